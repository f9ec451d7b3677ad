"""TensorFlow's private names that towers cannot do without. No other module knows them.

Each part says which need it serves and why no public way does; all hold in TensorFlow 2.20 and
2.21. The tests of this module name the part that a new version breaks.
"""

import inspect
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.data.util.structure import NoneTensorSpec
from tensorflow.python.ops import resource_variable_ops

from towers.machine.replaced import replaced

# The class of what `tf.Variable(...)` makes, whose methods are to be replaced. It has no public
# name, and to make one to ask for its class is refused while a graph is traced.
VARIABLE_CLASS: type = resource_variable_ops.ResourceVariable

# The spec of a None in a tf.data element, such as an optional input that is not given. It has no
# public name, and to ask an element of a data set for its class makes operations.
NONE_SPEC: type = NoneTensorSpec

# Graphs.

# For `tf.function(experimental_attributes=)`: the graph optimizer works on the function by itself,
# and does not copy its body into each caller. The argument is public, this attribute's name is not.
KEEP_WHOLE = {"_noinline": True}

# The attribute of a graph's node that names the nodes it is to be placed with. A node that is
# copied without them is refused; `tf.graph_util` removes no attributes.
COLOCATION = "_class"


def replace_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Makes an operation of a graph that is still being traced read another tensor.

    In public a graph is only added to, and a tape chooses by itself what it adds: it does not look
    at `tf.Graph.gradient_override_map`.
    """
    operation._update_input(index, tensor)


def read_instead(old: tf.Tensor, new: tf.Tensor) -> None:
    """Makes all that reads a tensor of a graph that is still being traced read another one."""
    for consumer in old.consumers():
        for index, value in enumerate(consumer.inputs):
            if value is old:
                replace_input(consumer, index, new)


def left_out(graph: tf.Graph, names: Collection[str]) -> None:
    """Leaves operations that nobody reads out of the function that is made of a graph.

    TensorFlow makes it of what `tf.Graph.get_operations` returns; no public name removes one.
    """
    get_operations = graph.get_operations
    graph.get_operations = lambda: [op for op in get_operations() if op.name not in names]


def define_functions(definition: tf.compat.v1.GraphDef) -> None:
    """Makes the functions of a graph's library known to the process, under their names.

    `tf.graph_util.import_graph_def` adds them to the one graph that it imports to; functions that
    call this graph do not find them. A name that is known already must have the same definition.
    """
    from tensorflow.python.eager import context

    for function in definition.library.function:
        if not context.context().has_function(function.signature.name):
            context.context().add_function_def(function)


def called_graph(operation: tf.Operation, name: str) -> Any:
    """The FuncGraph of a function that an operation calls; None where Python did not trace it.

    An operation tells the function's name in public; a graph hands out no functions by name.

    Args:
        operation: such as a StatefulPartitionedCall, a While.
        name: of the attribute, such as "f", "body".
    """
    try:
        function = operation.graph._get_function(operation.get_attr(name).name)
        return getattr(function, "graph", None)
    except ValueError:
        return None


@contextmanager
def custom_gradients_forgotten() -> Iterator[None]:
    """Within, operations with gradients of their own are traced that nobody will differentiate.

    TensorFlow keeps every such gradient of a graph in a registry of the process, for ever; and with
    it the graph, and the variables that it reads. Keras' optimizers make one (the all-reduce of
    tf.distribute): each new step would leave its parameters and its slots in the memory. There is
    no public way to remove an entry.
    """
    from tensorflow.python.framework import ops

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
    """Within, gradients of one's own are traced in the scope that their forward pass's name says.

    A tape puts the gradient of each of TensorFlow's operations into "gradient_tape/SCOPE/", from
    which its layer is known; that of a `tf.custom_gradient` (`tf.nn.silu`), or of a `tf.function`
    within the function, it leaves in none. The tape has no hook.
    """
    from tensorflow.python.eager import record

    def recording(original: Callable) -> Callable:
        def record_in_scope(
            op_type: Any, output_tensors: Any, input_tensors: Any, backward_function: Callable,
            *others: Any, **more: Any,
        ) -> Any:
            scope = tf.get_current_name_scope()

            def backward_in_scope(*gradients: Any) -> Any:
                with tf.name_scope(f"gradient_tape/{scope}/"):
                    return backward_function(*gradients)

            return original(
                op_type, output_tensors, input_tensors, backward_in_scope, *others, **more
            )

        return record_in_scope

    with (
        replaced(record, "record_operation", recording),
        replaced(record, "record_operation_backprop_only", recording),
    ):
        yield


@contextmanager
def recomputed_by(
    call: Callable[[Callable, Sequence[Any], Mapping[str, Any]], Any],
) -> Iterator[None]:
    """Within, in this thread, what tf.recompute_grad has wrapped is called by `call` in graphs.

    tf.recompute_grad can be replaced in public, but layers wrap functions when they are made.

    Args:
        call: (the function that was wrapped, args, kwargs) -> its result.
    """
    from tensorflow.python.ops import custom_gradient

    thread = threading.get_ident()

    def decorator(original: Callable) -> Callable:
        def decorated(f: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            is_recomputed = f.__qualname__ == "recompute_grad.<locals>.inner"
            if is_recomputed and threading.get_ident() == thread:
                return call(inspect.getclosurevars(f).nonlocals["f"], args, kwargs)
            return original(f, args, kwargs)

        return decorated

    with replaced(custom_gradient, "_graph_mode_decorator", decorator):
        yield


# Workers.


def start_collectives(addresses: Sequence[str], index: int) -> None:
    """Lets this process's collective operations meet those of other processes, over gRPC.

    Before TensorFlow starts: its server begins to listen when it does. tf.distribute's strategies
    are the public way; they bring the coordination service with them, which waits for minutes for
    a worker that never starts and swallows SIGTERM, and scopes that towers do not live in.
    """
    from tensorflow.python.eager import context

    context.context().configure_collective_ops(
        collective_leader=_task_name(0), scoped_allocator_enabled_ops=(),
        device_filters=(f"/job:{_JOB}/task:{index}",),
    )
    context.context().enable_collective_ops(_Server(list(addresses), index))


class _Server:
    """Stands for the ServerDef that TensorFlow writes out when it starts.

    Made only then: it holds the logical devices and the threads, which may still be chosen.
    """

    job_name = property(lambda self: _JOB)

    def __init__(self, addresses: list[str], index: int) -> None:
        self._addresses, self.task_index = addresses, index

    def SerializeToString(self) -> bytes:  # noqa: N802  (the message's own name)
        from tensorflow.core.protobuf import tensorflow_server_pb2
        from tensorflow.python.eager import context

        config = context.context().config
        config.device_filters[:] = [f"/job:{_JOB}/task:{self.task_index}"]
        server: bytes = tensorflow_server_pb2.ServerDef(
            cluster=tf.train.ClusterSpec({_JOB: self._addresses}).as_cluster_def(),
            default_session_config=config,
            job_name=_JOB,
            task_index=self.task_index,
            protocol="grpc",
        ).SerializeToString()
        return server


def health_error(index: int, timeout: float) -> tf.errors.OpError | None:
    """Asks a worker's TensorFlow whether it is there; not whether it computes.

    Returns:
        None: it has answered within `timeout` seconds. `tf.errors.UnavailableError`: nobody listens
        where the worker was. Any other error: it is silent.
    """
    from tensorflow.python.eager import context

    try:
        context.context().check_collective_ops_peer_health(
            _task_name(index), timeout_in_ms=round(1000 * timeout)
        )
    except tf.errors.OpError as error:
        return error
    return None


_SAME_ELEMENTS = re.compile("_?(Cache|Options|Prefetch|Repeat|Shuffle|Skip|Take)Dataset")


def ends_in_batch(dataset: tf.data.Dataset) -> bool:
    """Whether `batch` made a dataset's elements, and no function has changed them since.

    A dataset tells the one before it by no public name.
    """
    while _SAME_ELEMENTS.fullmatch(type(dataset).__name__):
        dataset = dataset._input_dataset
    return "Batch" in type(dataset).__name__


def _task_name(index: int) -> str:
    """A worker's name in TensorFlow's messages."""
    return f"/job:{_JOB}/replica:0/task:{index}"


_JOB = "worker"
