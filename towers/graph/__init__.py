"""Traced functions of one tower: cut where the towers meet, and asked what a value is to its rows.

A synchronized BatchNormalization, on two towers:

    level 0   tower 0   convolution, n, sum(x) --+
              tower 1   convolution, n, sum(x) --+-- collective: their sums
    level 1   tower 0   mean, sum((x - mean)^2) --+
              tower 1   mean, sum((x - mean)^2) --+-- collective: their sum
    level 2   tower 0   variance, the normalized x, the next convolution ...

    tower_collectives.py   where towers meet          dependence.py   what each tensor depends on
    cut.py                 a function for each level  repeatable.py   the same bits every time
    merged.py              repeats, computed once     stage_levels.py the levels of layers in stages
    walk.py                how all of these go through a graph

No tower waits for another inside of a function: any number of towers may share a device.

The walk tells what a tensor is to the rows of a shard: rows, a mean, a sum, or neither.

    rows.py    the question, and the walk through the graph that answers it
    rules.py   the table: which operation makes what of its inputs' facts
    facts.py   what is known of a tensor, and the arithmetic of that
    axes.py    where the batch axis goes    elements.py, reductions.py   the longer rules

Optional reading: a step whose losses are means over rows never needs more than its answer, "mean".
"""
