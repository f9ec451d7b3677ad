"""A function of one tower, traced once, cut where the towers meet, and called level by level.

A synchronized BatchNormalization, on two towers:

    level 0   tower 0   convolution, n, sum(x) --+
              tower 1   convolution, n, sum(x) --+-- meeting: their sums
    level 1   tower 0   mean, sum((x - mean)^2) --+
              tower 1   mean, sum((x - mean)^2) --+-- meeting: their sum
    level 2   tower 0   variance, the normalized x, the next convolution ...

    meetings.py     where towers meet          dependence.py   what each tensor depends on
    cut.py          a function for each level  lines.py        the user's lines, for messages
    rows.py         means and sums over rows, found in the graph: row_facts, row_rules ...

No tower waits for another inside of a function: any number of towers may share a device.
"""
