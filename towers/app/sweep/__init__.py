"""A sweep: global batch x GPU count -> sweep.csv, sweep.png and one sentence of advice.

    cells.py       the cells: each is one train.py in its own process
    directory.py   --out_dir: its settings and its lock
    child.py       the process of a cell: train.py, then its memory
    table.py       sweep.csv: one row for each cell, with speed-up and efficiency
    chart.py       sweep.png
    advice.py      the last line: from which global batch on n GPUs are faster than 1
    progress.py    the terminal
    run_cells.py   runs all cells in order
"""
