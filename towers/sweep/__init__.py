"""A sweep: global batch x GPU count -> sweep.csv, sweep.png and one sentence of advice.

    cells.py       what is run: each cell is one train.py in a process of its own
    directory.py   --out_dir: its settings, its lock
    child.py       that process: train.py, then its memory
    table.py       sweep.csv: a row a cell, speed-up and efficiency
    break_even.py  from which global batch on n GPUs are faster than 1
    machine.py     what the cells ran on
    chart.py       sweep.png
    advice.py      the last line
    progress.py    what the terminal shows
    run.py         all of it, in order
"""
