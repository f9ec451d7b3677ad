"""Tells what a tensor of a traced graph is to the rows of a shard: rows, a mean, a sum, or neither.

    rows.py     the question, and the walk through the graph that answers it
    facts.py    what is known of a tensor           rules.py  which operation makes what of that
    axes.py     where the batch axis goes           row_by_row.py, reductions.py, pieces.py,
                                                    inner_functions.py  the operations by kinds

Optional reading: a step whose losses are means over rows never needs more than its answer, "mean".
"""
