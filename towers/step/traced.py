"""A step's graphs: each traced once for batches of one structure, whatever their number of rows."""

from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from towers.machine import hang
from towers.workers.cluster import Cluster
from towers.machine.devices import HOST
from towers.workers.watch import watched
from towers.step.first_error import first_error
from towers.step.row_counts import check_arrays, check_rows
from towers.step.sharding import BatchValues, Placed
from towers.step.structures import any_rows, map_tensors
from towers.step.tensor_rows import as_tensor


class TracedGraphs:
    """Runs methods as TensorFlow graphs, traced as they are first called.

    traces: the concrete functions, in the order in which they were traced.
    """

    def __init__(
        self, methods: Mapping[str, Callable], cluster: Cluster,
        prepare: Callable[[str, Any], None], in_turn: Callable[..., None],
    ) -> None:
        """
        Args:
            methods: by their names: (x, y and sample_weight, shards or None) -> a result; each runs
                in Python only to be traced.
            cluster: the workers that run the graphs together.
            prepare: called before a trace, with the name and the batch's TensorSpecs.
            in_turn: runs the towers of a step, "train", "test" or "predict", on a batch, one after
                the other, to raise the first error.
        """
        self._methods, self._cluster = methods, cluster
        self._prepare, self._in_turn = prepare, in_turn
        self.traces: list[Any] = []
        self._functions: dict[str, Any] = {}  # by method and structure

    def call(self, name: str, batch: BatchValues, placed: Placed = None) -> Any:
        """The method's result for a batch, computed by its graph.

        Args:
            name: of the method.
            batch: structures of tensors or arrays [N, ...], N >= 1; None stays None.
            placed: its shards. Their specs follow from the batch's: to compare them at each call
                would take longer than to start the towers.

        Raises:
            ValueError: N is 0, or not the same in all parts.
        """
        check_arrays(*batch)
        with tf.device(HOST):  # a GPU would take the arrays of the whole batch first
            tensors = map_tensors(as_tensor, batch)
        check_rows(*tensors)
        if next(v for v in tf.nest.flatten(tensors) if v is not None).shape[0] == 0:
            raise ValueError("the global batch has no examples.")
        specs = map_tensors(any_rows, tensors)  # a partial batch needs no trace of its own
        key = f"{name} {specs} {placed is None}"
        phase = f"a {name} step"
        if key not in self._functions:
            with hang.within(f"the trace of {phase}", is_patient=True):
                self._prepare(name, specs)
                function = tf.function(self._methods[name], autograph=False)
                traced = function.get_concrete_function(specs, map_tensors(any_rows, placed))
            self._functions[key] = traced
            self.traces.append(traced)
        in_turn = "train" if name == "gradients" else name
        with watched(self._cluster, phase), first_error(lambda: self._in_turn(in_turn, *tensors)):
            return self._functions[key](tensors, placed)

    def find(self, name: str) -> tf.compat.v1.GraphDef | None:
        """The graph of a method, each node with its device; None before it has run."""
        for key, traced in self._functions.items():
            if key.startswith(name):
                return traced.graph.as_graph_def()
        return None
