"""Names the scopes of a step's graph, which TensorBoard's graphs and traces show.

    split, parameters, weights, tower_0 ... tower_7, sum, update
"""

SPLIT, PARAMETERS, WEIGHTS, SUM, UPDATE = "split", "parameters", "weights", "sum", "update"


def tower(index: int) -> str:
    """Returns the name of a tower's scope."""
    return f"tower_{index}"
