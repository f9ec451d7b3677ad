"""Compares an operation on the whole batch with the same operation divided among towers.

A shape with "n" has rows along that axis; one without is whole. "m" is another open size. A rule
has a case for rows that it divides, and one for each reason not to divide.
"""

import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from towers.divide.divided import Divided
from towers.divide.machines import Machine
from towers.step.exchange import LocalExchange
from towers.step.structures import RowComponents

R = tf.raw_ops
N3, N34, T3N4 = ("n", 3), ("n", 3, 4), (3, "n", 4)
IMAGE = ("n", 6, 6, 2)
TOWERS = 3
ROWS = (7, 1, 2)  # uneven shards; shards without a row
_AT_ONCE = 12  # cases in one trace: tracing takes most of the time
EXTREMES = ((0.0, 1e30), (np.nan,))  # some entries of the inputs are replaced by one of these


class Case(NamedTuple):
    """kind: type of the operation. make(*inputs): the trace. shapes: of the inputs.

    divided: whether the operation must run in towers; None: it may. fill: of the inputs, such as
    "positive" or "labels". extremes: values with which it runs besides.
    """

    kind: str
    make: Callable[..., Any]
    shapes: tuple
    divided: bool | None = True
    fill: str = "normal"
    extremes: tuple = EXTREMES

    @property
    def name(self) -> str:
        places = "_".join("x".join(map(str, shape)) or "scalar" for shape in self.shapes)
        return f"{self.kind}-{places}"


class Cases(list[Case]):
    """The cases of a module of rules."""

    def add(self, kind: str, make: Callable, *shapes: tuple, **options: Any) -> None:
        """options: `divided`, `fill` and `extremes` of the case."""
        self.append(Case(kind, make, shapes, **options))

    def add_once(self, kind: str, make: Callable, *shapes: tuple, **options: Any) -> None:
        """A case that must not run in towers."""
        self.add(kind, make, *shapes, divided=False, **options)

    @property
    def groups(self) -> list[list[Case]]:
        """The cases that are traced together."""
        return [self[i : i + _AT_ONCE] for i in range(0, len(self), _AT_ONCE)]


def raw(kind: str) -> Callable[..., Any]:
    """Returns a call of an operation, with the inputs by their position."""
    operation = getattr(R, kind)
    names = [name for name in inspect.signature(operation).parameters if name != "name"]
    return lambda *inputs: operation(**dict(zip(names, inputs)))


def gradient_of(function: Callable, which: int = 0) -> Callable:
    """Returns the gradient with respect to an input, of a loss that is not linear."""

    def gradient(*inputs: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            y = function(*inputs)
            loss = tf.reduce_sum(y * tf.sin(y))
        return tape.gradient(loss, inputs[which])

    return gradient


def values(case: Case, n: int, extremes: tuple = ()) -> list[np.ndarray]:
    """Returns the inputs for n rows, which lie along axis 0."""
    rng = np.random.default_rng(n)
    found = [_filled(case, i, rng, n) for i in range(len(case.shapes))]
    if extremes and case.fill != "labels":
        for value in found:
            is_extreme = rng.random(value.shape) < 0.2
            value[is_extreme] = rng.choice(extremes, np.count_nonzero(is_extreme))
    return found


def _filled(case: Case, i: int, rng: np.random.Generator, n: int) -> np.ndarray:
    shape = case.shapes[i]
    sizes = [{"n": n, "m": 5}.get(size, size) for size in _rows_first(shape)]
    is_last_of_several = i == len(case.shapes) - 1 > 0
    if case.fill in ("positive", "above_one"):
        found = np.abs(rng.normal(size=sizes)) + 1.1 * (case.fill == "above_one") + 0.1
    elif case.fill in ("unit", "probability"):
        found = rng.uniform(-0.9 if case.fill == "unit" else 0.1, 0.9, sizes)
    elif case.fill == "labels" and "n" in shape and (is_last_of_several or i == 0 and _reads(case)):
        found = rng.integers(0, 3, sizes)
    else:
        found = rng.normal(size=sizes)
    return np.asarray(found, "float32" if case.fill == "float32" else "float64")


def _reads(case: Case) -> bool:
    """Returns whether the first input has indices, because no other one has rows."""
    return all("n" not in shape for shape in case.shapes[1:])


def _rows_first(shape: tuple) -> list:
    """Returns the sizes with the first axis of rows in front."""
    if "n" not in shape:
        return list(shape)
    axis = shape.index("n")
    return ["n", *shape[:axis], *shape[axis + 1 :]]


def _moved(value: tf.Tensor, shape: tuple) -> tf.Tensor:
    """Returns a value with its rows along the axis that the case wants."""
    axis = shape.index("n") if "n" in shape else 0
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
    return tf.transpose(value, order) if axis else value


def _traced(cases: list[Case]) -> Any:
    """Returns a function of all inputs of all cases, traced for any number of rows."""
    specs = []
    for case in cases:
        for shape, value in zip(case.shapes, values(case, 2), strict=True):
            sizes = [None if size in ("n", "m") else size for size in _rows_first(shape)]
            specs.append(tf.TensorSpec(sizes, value.dtype))

    def function(*inputs):
        given, results = iter(inputs), []
        for i, case in enumerate(cases):
            with tf.name_scope(f"case{i}"):
                moved = [_moved(next(given), shape) for shape in case.shapes]
                results.append(tf.nest.flatten(case.make(*moved)))
        return results

    return tf.function(function, autograph=False).get_concrete_function(*specs)


def traced_and_divided(cases: list[Case]) -> tuple[Any, Divided]:
    """Returns a function of all inputs of all cases, and the same divided."""
    whole = _traced(cases)
    shapes = [shape for case in cases for shape in case.shapes]
    row_inputs = [i for i, shape in enumerate(shapes) if "n" in shape]
    return whole, Divided(
        whole.graph,
        RowComponents(row_inputs),
        Machine(["/cpu:0"] * TOWERS, LocalExchange(TOWERS)),
    )


def assert_alike(cases: list[Case]) -> None:
    """Compares whole and divided, and checks what runs in towers."""
    whole, divided = traced_and_divided(cases)
    for i, case in enumerate(cases):
        scope = re.compile(rf"(gradient_tape/)?case{i}/")
        ops = [op for op in divided.ops if op.type == case.kind and scope.match(op.source.name)]
        places = {op.in_towers is not None for op in ops}
        if not places and (case.divided is None or case.kind == "TensorListElementShape"):
            continue  # left out, because in the end nothing reads its result
        # With several of a kind, such as in a gradient, one tells.
        assert places and case.divided in {None, *places}, f"{case.name} runs in towers: {places}"
    run = tf.function(lambda *inputs: divided(*inputs), autograph=False)
    run = run.get_concrete_function(*whole.structured_input_signature[0])  # for all numbers of rows
    for n, extremes in [*((n, ()) for n in ROWS), *((7, extremes) for extremes in EXTREMES)]:
        inputs = [
            tf.constant(value)
            for case in cases
            for value in values(case, n, extremes if extremes in case.extremes else ())
        ]
        expected = tf.nest.flatten(whole(*inputs))
        of = [case for case, found in zip(cases, whole.structured_outputs) for _ in found]
        for case, ours, theirs in zip(of, run(*inputs), expected, strict=True):
            _assert_equal(ours.numpy(), theirs.numpy(), f"{case.name} {extremes}", extremes)


def _assert_equal(ours: np.ndarray, theirs: np.ndarray, name: str, extremes: tuple) -> None:
    """Compares values; extreme ones may be NaN or infinite, and large ones cancel in sums."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
    relative = absolute = 1e-12 if ours.dtype == np.float64 else 1e-5
    if extremes:
        is_finite = np.isfinite(theirs)
        is_same = (ours == theirs) | np.isnan(ours) & np.isnan(theirs)
        assert np.where(is_finite, np.isfinite(ours), is_same).all(), (
            f"{name}: {ours} instead of {theirs}"
        )
        ours, theirs = ours[is_finite], theirs[is_finite]
        absolute *= np.max(np.abs(theirs), initial=1.0)
    np.testing.assert_allclose(ours, theirs, relative, absolute, err_msg=name)


def kinds_without(rules: dict[str, Callable], module: Any, cases: list[Case]) -> set[str]:
    """Returns the operations with a rule in a module of which no case is divided."""
    own = {kind for kind, rule in rules.items() if rule.__module__ == module.__name__}
    return own - {case.kind for case in cases if case.divided}
