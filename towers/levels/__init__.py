"""A function of one tower, traced once, cut where the towers meet, and called level by level.

A synchronized BatchNormalization, on two towers:

    level 0   tower 0   convolution, n, sum(x) --+
              tower 1   convolution, n, sum(x) --+-- collective: their sums
    level 1   tower 0   mean, sum((x - mean)^2) --+
              tower 1   mean, sum((x - mean)^2) --+-- collective: their sum
    level 2   tower 0   variance, the normalized x, the next convolution ...

    tower_collectives.py   where towers meet          dependence.py   what each tensor depends on
    cut.py                 a function for each level  repeatable.py   the same bits every time

No tower waits for another inside of a function: any number of towers may share a device.
"""
