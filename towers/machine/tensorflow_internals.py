"""Holds the private names of TensorFlow that towers needs, and says why no public name works.

All exist in TensorFlow 2.20 and 2.21. If a new version breaks one, this module's tests name it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import tensorflow_server_pb2
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.data.util.structure import NoneTensorSpec
from tensorflow.python.eager import context, lift_to_graph, record
from tensorflow.python.framework import func_graph, ops

from towers.machine.replaced import replaced

# The spec of a None in a tf.data element; to take the class from an element makes operations.
NONE_SPEC: type = NoneTensorSpec

# For `tf.function(experimental_attributes=)`: the graph optimizer works on the function alone, and
# does not copy its body into each caller.
KEEP_WHOLE = {"_noinline": True}

# The environment variable that gives each logical CPU device its own intra-op threads, if "true".
# XLA runs a program on them: with one thread for all devices, compiled towers would take turns.
OWN_THREADS = "TF_OVERRIDE_GLOBAL_THREADPOOL"

# The attribute of a graph's node that names the nodes it must be placed with. TensorFlow rejects
# a node that is copied without these nodes.
COLOCATION = "_class"

_PLACES = (COLOCATION, "_output_shapes")
_COMPILED = "_XlaMustCompile"  # the attribute of a call that XLA compiles


def define_functions(definition: tf.compat.v1.GraphDef) -> None:
    """Registers the functions of a graph's library in the process, under their names."""
    # `tf.graph_util.import_graph_def` adds them only to one graph; its callers do not find them.
    for function in definition.library.function:
        if not context.context().has_function(function.signature.name):
            context.context().add_function_def(function)


def called_graphs(operation: tf.Operation, name: str) -> list[tf.Graph]:
    """Returns the FuncGraphs in an operation's attribute, such as "body", that Python traced.

    The attribute "branches" holds a list of functions.
    """
    try:
        found = tf.nest.flatten(operation.get_attr(name))
        functions = [operation.graph._get_function(function.name) for function in found]
    except ValueError:
        return []
    return [function.graph for function in functions if hasattr(function, "graph")]


def evaluated(tensor: tf.Tensor) -> np.ndarray | None:
    """Returns the value of a graph's integer tensor if it follows from shapes, or None."""
    if not (tensor.dtype.is_integer or tensor.dtype.is_bool) or tensor.op.type == "Placeholder":
        return None
    # tf.get_static_value knows few operations; this runs those that shape inference runs.
    with tensor.graph._c_graph.get() as graph:
        return pywrap_tf_session.TF_TryEvaluateConstant_wrapper(graph, tensor._as_tf_output())


def copied(
    operation: tf.Operation,
    inputs: list[tf.Tensor],
    attributes: Mapping[str, tf.compat.v1.AttrValue] | None = None,
) -> list[tf.Tensor]:
    """Copies an operation into the current graph; `attributes` replace some attributes."""
    kept = {k: v for k, v in operation.node_def.attr.items() if k not in _PLACES}
    graph = tf.compat.v1.get_default_graph()
    inputs = [graph.capture(value) for value in inputs]
    copy = graph._create_op_internal(
        operation.type,
        inputs,
        [v.dtype for v in operation.outputs],
        attrs={**kept, **(attributes or {})},
        name=operation.name.lstrip("_"),
    )
    return list(copy.outputs)


def traced_graph(
    function: Callable, specs: Sequence[tf.TypeSpec]
) -> tuple[tf.Graph, list[tf.Variable]]:
    """Traces a function of tensors once; returns its FuncGraph, and the variables that it has made.

    These are initialized at once, outside of the graph.
    """
    made = []

    def noted(next_creator: Callable, **options: Any) -> tf.Variable:
        first = options.get("initial_value")
        if tf.is_symbolic_tensor(first):
            with suppress(lift_to_graph.UnliftableError):  # TensorFlow's own error follows
                options["initial_value"] = _outside(first)
        made.append(next_creator(**options))
        return made[-1]

    def noting(*data: tf.Tensor) -> object:
        with tf.variable_creator_scope(noted):
            return function(*data)

    # A `tf.function` that makes variables, as an optimizer does at first, is traced twice.
    names = ["data"] * len(specs)  # as in Keras, in the names of messages
    graph = func_graph.func_graph_from_py_func(
        function.__name__, noting, tuple(specs), {}, arg_names=names
    )
    return graph, made


def _outside(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the value of a tensor that is being traced, such as zeros like a variable.

    `tf.function` does the same for the first values of variables, in no public function. Raises
    UnliftableError if the value depends on the data, or on the value of a variable.
    """

    def compute() -> tf.Tensor:
        return lift_to_graph.lift_to_graph([tensor], tf.compat.v1.get_default_graph())[tensor]

    with tf.init_scope():
        return tf.function(compute, autograph=False)()


def is_compiled(operation: tf.Operation) -> bool:
    """Returns whether an operation is a call of a function that XLA compiles."""
    return _COMPILED in operation.node_def.attr and operation.get_attr(_COMPILED)


def without_xla(function: Callable, *values: object) -> Any:
    """Calls a function that XLA compiles, without XLA, as the only call of the current graph."""
    # Each call is marked. A function without the mark would be traced, or copied, once more.
    results = function(*values)
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if _COMPILED in operation.node_def.attr:
            operation._clear_attr(_COMPILED)
    return results


@contextmanager
def custom_gradients_forgotten() -> Iterator[None]:
    """Removes the custom gradients traced inside the context, which are never differentiated.

    TensorFlow keeps every custom gradient forever, and with it the graph and its variables. Keras'
    optimizers make one, so each new step would leave its parameters and slots in memory.
    """
    registry = ops.gradient_registry._registry
    before = set(registry)
    try:
        yield
    finally:
        for name in set(registry) - before:
            if name.startswith("CustomGradient-"):
                del registry[name]


@contextmanager
def custom_gradients_in_scope() -> Iterator[None]:
    """Inside the context, custom gradients are traced in the name scope of their forward pass.

    A tape puts the gradient of each TensorFlow operation into "gradient_tape/SCOPE/", but a
    `tf.custom_gradient`'s (`tf.nn.silu`), or a nested `tf.function`'s, into no scope.
    """

    def recording(original: Callable) -> Callable:
        def record_in_scope(
            op_type: str,
            outputs: Sequence[tf.Tensor],
            inputs: Sequence[tf.Tensor],
            backward_function: Callable,
            *rest: object,
            **more: object,
        ) -> object:
            scope = tf.get_current_name_scope()

            def backward_in_scope(*gradients: tf.Tensor) -> object:
                with tf.name_scope(f"gradient_tape/{scope}/"):
                    return backward_function(*gradients)

            return original(op_type, outputs, inputs, backward_in_scope, *rest, **more)

        return record_in_scope

    with (
        replaced(record, "record_operation", recording),
        replaced(record, "record_operation_backprop_only", recording),
    ):
        yield


_JOB = "worker"
_TASK = f"/job:{_JOB}/replica:0/task:{{}}"  # a worker's name in TensorFlow's messages


def start_collectives(addresses: Sequence[str], index: int) -> None:
    """Connects the collective operations of this process with other processes, over gRPC.

    Call it before TensorFlow starts. The public way, tf.distribute, needs scopes and a coordination
    service that swallows SIGTERM and waits minutes for a worker that never starts.
    """
    context.context().configure_collective_ops(
        collective_leader=_TASK.format(0),
        scoped_allocator_enabled_ops=(),
        device_filters=(f"/job:{_JOB}/task:{index}",),
    )
    context.context().enable_collective_ops(_Server(list(addresses), index))


class _Server:
    """Stands for the ServerDef; devices and threads may change until TensorFlow serializes it."""

    job_name = property(lambda self: _JOB)

    def __init__(self, addresses: list[str], index: int) -> None:
        self._addresses, self.task_index = addresses, index

    def SerializeToString(self) -> bytes:  # noqa: N802  (the message's own name)
        config = context.context().config
        config.device_filters[:] = [f"/job:{_JOB}/task:{self.task_index}"]
        return tensorflow_server_pb2.ServerDef(  # type: ignore[no-any-return]
            cluster=tf.train.ClusterSpec({_JOB: self._addresses}).as_cluster_def(),
            default_session_config=config,
            job_name=_JOB,
            task_index=self.task_index,
            protocol="grpc",
        ).SerializeToString()


def health_error(index: int, timeout: float) -> tf.errors.OpError | None:
    """Returns None if a worker's TensorFlow answers in time, although it may compute nothing.

    `tf.errors.UnavailableError` means that nothing listens at its address, another error silence.
    """
    try:
        context.context().check_collective_ops_peer_health(
            _TASK.format(index), timeout_in_ms=round(1000 * timeout)
        )
    except tf.errors.OpError as error:
        return error
    return None


_SAME_ELEMENTS = re.compile("_?(Cache|Options|Prefetch|Repeat|Shuffle|Skip|Take)Dataset")


def ends_in_batch(dataset: tf.data.Dataset) -> bool:
    """Returns whether `batch` made a data set's elements, and no function changed them since."""
    while _SAME_ELEMENTS.fullmatch(type(dataset).__name__):
        dataset = dataset._input_dataset
    return "Batch" in type(dataset).__name__
