"""The name scopes that a step writes into its graph; TensorBoard's graphs and traces show them.

    split, parameters, weights, tower_0 ... tower_7, sum, update
"""

SPLIT, PARAMETERS, WEIGHTS, SUM, UPDATE = "split", "parameters", "weights", "sum", "update"


def tower(index: int) -> str:
    """The name of a tower's scope."""
    return f"tower_{index}"
