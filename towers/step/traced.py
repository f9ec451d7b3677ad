"""A step's graphs: each traced once for batches of one structure, whatever their number of rows."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from towers.machine import hang
from towers.workers.cluster import Cluster
from towers.machine.devices import HOST
from towers.workers.watch import watched
from towers.step.first_error import first_error
from towers.step.row_counts import check_arrays, check_rows
from towers.step.structures import Structure, any_rows, map_tensors
from towers.step.tensor_rows import as_tensor


class TracedGraphs:
    """Runs methods as TensorFlow graphs, traced as they are first called.

    traces: the concrete functions, in the order in which they were traced.
    """

    def __init__(
        self, cluster: Cluster, before_first: Callable[[], None], in_turn: Callable[..., None]
    ) -> None:
        """
        Args:
            cluster: the workers that run the graphs together.
            before_first: called once, before the first trace.
            in_turn: runs the towers of a step, "train", "test" or "predict", on a batch, one after
                the other, to raise the first error.
        """
        self._cluster, self._before_first, self._in_turn = cluster, before_first, in_turn
        self.traces: list[Any] = []
        self._functions: dict[str, Any] = {}  # by method and structure

    def call(
        self,
        method: Callable,
        *batch: Structure,
        behind: Sequence[Structure] = (),
        prepare: Callable[..., None] | None = None,
    ) -> Any:
        """Returns `method(*batch, *behind)`, computed by its graph.

        Args:
            method: a bound method; it runs in Python only to be traced.
            batch: structures of tensors or arrays [N, ...], N >= 1; None stays None.
            behind: what has, unless it is None, specs that follow from the batch's, such as its
                shards. To compare these at each call would take longer than to start the towers.
            prepare: called before a trace, with the batch's TensorSpecs.

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
        key = f"{method.__name__} {specs} {[value is None for value in behind]}"
        phase = f"a {method.__name__.strip('_')} step"
        if not self._functions:
            self._before_first()
        if key not in self._functions:
            with hang.within(f"the trace of {phase}", is_patient=True):
                if prepare:
                    prepare(*specs)
                function = tf.function(method, autograph=False)
                traced = function.get_concrete_function(*specs, *map_tensors(any_rows, behind))
            self._functions[key] = traced
            self.traces.append(traced)
        name = next((n for n in ("test", "predict") if n in method.__name__), "train")
        with watched(self._cluster, phase), first_error(lambda: self._in_turn(name, *tensors)):
            return self._functions[key](*tensors, *behind)

    def find(self, method: Callable) -> tf.compat.v1.GraphDef | None:
        """The graph of a method, each node with its device; None before it has run."""
        for key, traced in self._functions.items():
            if key.startswith(method.__name__):
                return traced.graph.as_graph_def()
        return None
