"""Every rule by itself: an operation computes the same whole and divided among towers."""

import re

import numpy as np
import pytest
import tensorflow as tf

from tests.divide.rule_cases import CASES, Case
from towers.divide.analysis import RULES
from towers.divide.divided import Divided

TOWERS = 3
ROWS = (7, 1, 2)  # uneven shards; shards without a row
AT_ONCE = 12  # cases in one trace: tracing takes most of the time
GROUPS = [CASES[i : i + AT_ONCE] for i in range(0, len(CASES), AT_ONCE)]


def values(case: Case, n: int) -> list[np.ndarray]:
    """Returns the inputs for n rows, which lie along axis 0."""
    rng = np.random.default_rng(n)
    return [_filled(case, i, rng, n) for i in range(len(case.shapes))]


def _filled(case: Case, i: int, rng: np.random.Generator, n: int) -> np.ndarray:
    shape = case.shapes[i]
    sizes = [n if size == "n" else size for size in _rows_first(shape)]
    is_last_of_several = i == len(case.shapes) - 1 > 0
    if case.fill in ("positive", "above_one"):
        return np.abs(rng.normal(size=sizes)) + 1.1 * (case.fill == "above_one") + 0.1
    if case.fill in ("unit", "probability"):
        return rng.uniform(-0.9 if case.fill == "unit" else 0.1, 0.9, sizes)
    if case.fill == "labels" and "n" in shape and (is_last_of_several or i == 0 and _reads(case)):
        return rng.integers(0, 3, sizes).astype("float64")
    dtype = "float32" if case.fill == "float32" else "float64"
    return rng.normal(size=sizes).astype(dtype)


def _reads(case: Case) -> bool:
    """Returns whether the first input has indices, because no other one has rows."""
    return all("n" not in shape for shape in case.shapes[1:])


def _rows_first(shape: tuple) -> list:
    """Returns the sizes with the first axis of rows in front."""
    if "n" not in shape:
        return list(shape)
    axis = shape.index("n")
    return ["n", *shape[:axis], *shape[axis + 1 :]]


def traced(cases: list[Case]):
    """Returns a function of all inputs of all cases, traced for any number of rows."""
    specs = []
    for case in cases:
        for shape, value in zip(case.shapes, values(case, 2), strict=True):
            sizes = [None if size == "n" else size for size in _rows_first(shape)]
            specs.append(tf.TensorSpec(sizes, value.dtype))

    def function(*inputs):
        given, results = iter(inputs), []
        for i, case in enumerate(cases):
            with tf.name_scope(f"case{i}"):
                moved = [_moved(next(given), shape) for shape in case.shapes]
                results.append(tf.nest.flatten(case.make(*moved)))
        return results

    return tf.function(function, autograph=False).get_concrete_function(*specs)


def _moved(value: tf.Tensor, shape: tuple) -> tf.Tensor:
    """Returns a value with its rows along the axis that the case wants."""
    axis = shape.index("n") if "n" in shape else 0
    order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
    return tf.transpose(value, order) if axis else value


@pytest.mark.parametrize("cases", GROUPS, ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}")
def test_an_operation_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    whole = traced(cases)
    shapes = [shape for case in cases for shape in case.shapes]
    divided = Divided(whole.graph, [i for i, s in enumerate(shapes) if "n" in s], ["/cpu:0"] * TOWERS)
    for i, case in enumerate(cases):
        scope = re.compile(rf"(gradient_tape/)?case{i}/")
        ops = [op for op in divided.ops if op.type == case.kind and scope.match(op.source.name)]
        places = {op.each is not None for op in ops}
        # With several of a kind, such as in a gradient, one tells.
        assert places and case.divided in {None, *places}, f"{case.name} runs in towers: {places}"
    run = tf.function(lambda *inputs: divided(*inputs), autograph=False)
    run = run.get_concrete_function(*whole.structured_input_signature[0])  # for all numbers of rows
    for n in ROWS:
        inputs = [tf.constant(value) for case in cases for value in values(case, n)]
        expected = tf.nest.flatten(whole(*inputs))
        names = [c.name for c, found in zip(cases, whole.structured_outputs) for _ in found]
        for name, ours, theirs in zip(names, run(*inputs), expected, strict=True):
            ours, theirs = ours.numpy(), theirs.numpy()
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, name
            tolerance = 1e-12 if ours.dtype == np.float64 else 1e-5
            np.testing.assert_allclose(ours, theirs, tolerance, tolerance, err_msg=name)


def test_every_rule_has_a_case_that_is_divided():
    assert set(RULES) - {case.kind for case in CASES if case.divided} == set()
