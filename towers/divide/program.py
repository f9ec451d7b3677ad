"""Makes a digest of a traced step: the operations, without names and without the machine."""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import tensorflow as tf

_SHAPES = "_output_shapes"  # of the variables that are read, too
# Names that a process draws or counts.
_LEFT_OUT = ("shared_name", "container", "token", "debug_name")


def program_digest(graph: tf.Graph) -> str:
    """Returns 16 hexadecimal digits that two graphs share if they have the same operations.

    The order, the constants, the functions and the shapes of variables count. The names of
    operations and of functions, and the devices, do not.
    """
    definition = graph.as_graph_def(add_shapes=True)
    functions = {each.signature.name: each for each in definition.library.function}

    @functools.cache
    def of_function(name: str) -> str:
        found = functions[name]
        arguments = [argument.name for argument in found.signature.input_arg]
        results = [found.ret[argument.name] for argument in found.signature.output_arg]
        return _digest(_lines(found.node_def, arguments, results))

    def of_value(value: tf.compat.v1.AttrValue) -> str:
        called = [value.func, *value.list.func]
        if names := [each.name for each in called if each.name in functions]:
            return " ".join(map(of_function, names))
        return str(value.SerializeToString(deterministic=True))

    def _lines(
        nodes: Iterable[tf.compat.v1.NodeDef], arguments: Sequence[str], results: Sequence[str]
    ) -> Iterator[str]:
        """Yields a text for each operation, with the places of its inputs, and the results."""
        nodes = list(nodes)
        place = {name: str(i) for i, name in enumerate([*arguments, *(n.name for n in nodes)])}

        def placed(names: Iterable[str]) -> list[str]:
            """Returns the inputs in their order, then those that only must come before."""
            found = [name.partition(":") for name in names]
            data = [place[n] + rest for n, _, rest in found if not n.startswith("^")]
            return data + sorted(f"^{place[n[1:]]}" for n, _, _ in found if n.startswith("^"))

        for node in nodes:
            if node.op in functions:
                op = of_function(node.op)
            else:
                op = node.op
            known = (n for n in node.attr if n == _SHAPES or not n.startswith("_"))
            kept = sorted(name for name in known if name not in _LEFT_OUT)
            attributes = [f"{name}={of_value(node.attr[name])}" for name in kept]
            yield " ".join([op, *placed(node.input), *attributes])
        yield " ".join(placed(results))

    return _digest(_lines(definition.node, [], []))


def _digest(lines: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
