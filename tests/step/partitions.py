"""The graphs that TensorFlow makes of a step for each device, after all of its optimizations."""

from collections.abc import Callable
from typing import Any

from tensorflow.python.eager import context


def partition_graphs(act: Callable[[], Any]) -> list:
    """The GraphDefs of what `act` is the first to run: one for each function and device."""
    metadata = context.context()
    metadata.ensure_initialized()
    metadata.enable_run_metadata()
    metadata.export_run_metadata()  # what others have left there
    act()
    functions = metadata.export_run_metadata().function_graphs
    metadata.disable_run_metadata()
    return [graph for function in functions for graph in function.partition_graphs]
