"""Sweeps over global batches and GPU counts: sweep.csv, sweep.png and one sentence of advice.

    table.py       sweep.csv: one row for each cell, with speed-up and efficiency; the advice
    chart.py       sweep.png
    run_cells.py   runs all cells in order, each in a process, in the directory of the sweep
"""
