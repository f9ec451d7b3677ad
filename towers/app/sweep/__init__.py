"""Sweeps over global batches and GPU counts: sweep.csv, sweep.png and one sentence of advice.

    cells.py       the cells: each is one run of train.py in a separate process
    table.py       sweep.csv: one row for each cell, with speed-up and efficiency
    advice.py      the last line: from which global batch on n GPUs are faster than 1
    chart.py       sweep.png
    run_cells.py   runs all cells in order, in the directory of the sweep
"""
