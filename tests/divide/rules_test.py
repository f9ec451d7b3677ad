"""Every rule by itself: an operation computes the same whole and divided among towers."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from tests.divide.rule_cases import CASES, Case
from towers.divide.analysis import Analysis  # noqa: F401  (fills the table of rules)
from towers.divide.divided import Divided
from towers.divide.rule import RULES

TOWERS = 3
ROWS = (7, 1, 2)  # uneven shards; shards without a row
NAMED = {f"{i}-{case.name}": case for i, case in enumerate(CASES)}


def values(case: Case, n: int) -> list[np.ndarray]:
    """Inputs with the rows along axis 0, or whole ones."""
    rng = np.random.default_rng(n)
    found = []
    for i, shape in enumerate(case.shapes):
        axis = shape.index("n") if "n" in shape else None
        sizes = [n if size == "n" else size for size in shape]
        if axis is not None:
            sizes = [n, *sizes[:axis], *sizes[axis + 1 :]]
        value = rng.normal(size=sizes)
        if case.fill in ("positive", "above_one"):
            value = np.abs(value) + (1.1 if case.fill == "above_one" or case.kind == "Acosh" else 0.1)
        elif case.fill in ("unit", "probability"):
            value = rng.uniform(-0.9 if case.fill == "unit" else 0.1, 0.9, sizes)
        elif case.fill == "labels" and ("n" in shape and i in (0, len(case.shapes) - 1)):
            is_table = len(case.shapes) == 2 and i == 0 and len(shape) > 1 and "n" in case.shapes[1]
            value = value if is_table else rng.integers(0, 5 if 5 in _sizes(case) else 3, sizes).astype(float)
        elif case.fill == "first":
            value = np.zeros(sizes) if i == 0 else value
        found.append(value.astype("float32") if case.fill == "float32" else value)
    return found


def _sizes(case: Case) -> set:
    return set(itertools.chain(*case.shapes))


def traced(case: Case):
    """The case's function of rows along axis 0, traced for any number of rows."""
    specs = [
        tf.TensorSpec([None if i == 0 and "n" in shape else n for i, n in enumerate(v.shape)], v.dtype)
        for shape, v in zip(case.shapes, values(case, 2), strict=True)
    ]
    specs = [
        tf.TensorSpec([None, *[None if m == "n" else m for m in shape[:axis] + shape[axis + 1 :]]], spec.dtype)
        if "n" in shape and (axis := shape.index("n")) >= 0 else spec
        for shape, spec in zip(case.shapes, specs, strict=True)
    ]

    def function(*inputs):
        moved = []
        for shape, value in zip(case.shapes, inputs, strict=True):
            axis = shape.index("n") if "n" in shape else 0
            order = [*range(1, axis + 1), 0, *range(axis + 1, len(shape))]
            moved.append(tf.transpose(value, order) if axis else value)
        return tf.nest.flatten(case.make(*moved))

    return tf.function(function, autograph=False).get_concrete_function(*specs)


@pytest.mark.parametrize("name", NAMED)
def test_an_operation_computes_the_same_whole_and_divided(name):
    case = NAMED[name]
    whole = traced(case)
    rows = [i for i, shape in enumerate(case.shapes) if "n" in shape]
    divided = Divided(whole, rows, ["/cpu:0"] * TOWERS)
    places = {op.each is not None for op in divided.ops if op.type == case.kind}
    assert places, f"the trace has no {case.kind}"
    if case.divided is not None:
        # With several of a kind, such as in a gradient, one tells.
        assert case.divided in places, f"{case.kind} runs in towers: {places}"
    run = tf.function(lambda *inputs: divided(*inputs), autograph=False)
    for n in ROWS:
        inputs = [tf.constant(value) for value in values(case, n)]
        for ours, theirs in zip(run(*inputs), whole(*inputs), strict=True):
            ours, theirs = ours.numpy(), theirs.numpy()
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            if ours.dtype.kind == "f" and n > 1:
                assert np.isfinite(theirs).all(), "a case must have finite results"
            tolerance = 1e-12 if ours.dtype == np.float64 else 1e-5
            np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def test_every_rule_has_a_case_that_is_divided():
    tried = {case.kind for case in CASES if case.divided}
    assert set(RULES) - tried == set()
