"""Cuts the traced function of one tower at its collectives, and tells sums over rows from means.

A synchronized BatchNormalization, on two towers:

    level 0   tower 0   convolution, n, sum(x) --+
              tower 1   convolution, n, sum(x) --+-- collective: their sums
    level 1   tower 0   mean, sum((x - mean)^2) --+
              tower 1   mean, sum((x - mean)^2) --+-- collective: their sum
    level 2   tower 0   variance, the normalized x, the next convolution ...

    cut.py     records collectives; makes one function for each level
    levels.py  what tensors depend on, and the levels of layers in stages
    merged.py  merges equal operations      repeatable.py  gives bit-identical results
    walk.py    walks through a graph for all of these

No tower waits for another inside of a function, so any number of towers may share a device.

The files below tell what a tensor is to the rows of a shard: rows, a mean, a sum, or neither.

    rows.py      walks through the graph, applies the rules, and warns
    rules.py     the table of rules: an operation's facts follow from its inputs' facts
    elements.py  rules of operations that work element by element
    indexing.py  rules of slices and gathers, and of the lists by which loops read and write rows
    facts.py     the facts of a tensor, and their arithmetic

They are optional reading: for a step whose losses are means over rows, the answer is always "mean".
"""
