"""Every rule of indices.py by itself: whole and divided among towers.

`tf.sin` of a result runs in towers if the result has rows; if it has parts, they are added up.
"""

import pytest
import tensorflow as tf

from tests.divide.whole_and_divided import (
    N3, N34, T3N4, Cases, assert_alike, gradient_of, kinds_without,
)  # fmt: skip
from towers.divide import indices
from towers.divide.rule import RULES

CASES = Cases()
add, add_once = CASES.add, CASES.add_once
N = ("n",)
LABELS = {"fill": "labels"}


def _int(x):
    return tf.cast(x, tf.int32)


def _numbers(x, step=1):
    """0, `step`, 2 * `step` ..., one for each row."""
    return step * tf.range(tf.shape(x)[0])


def _each(x, i):
    """(number of the row, label)"""
    return tf.stack([_numbers(x), _int(i)], 1)


def _sum(x, i, count):
    """Sums to so many segments for each row."""
    return tf.sin(tf.math.unsorted_segment_sum(x, i, count * tf.shape(x)[0]))


def _total(i):
    """Integers in parts, all zero."""
    return tf.reduce_sum(_int(0 * i), 0)


def _pairs(x, count):
    """0, 1, 2 ... in rows of a length."""
    return tf.reshape(tf.range(count * tf.shape(x)[0]), [-1, count])


def _largest(x):
    """Places of the two largest of each row's three numbers."""
    return tf.math.top_k(x, 2).indices


add("UnsortedSegmentSum", lambda x, i: tf.math.unsorted_segment_sum(x, _int(i), 3), N3, N, **LABELS)
add(
    "UnsortedSegmentSum",
    lambda x, i: tf.math.unsorted_segment_sum(x, _int(i), 3),
    N34,
    N3,
    **LABELS,
)
add("Sin", lambda x: tf.sin(tf.math.unsorted_segment_sum(x, [0, 2, 0], 3)), T3N4)
add("Sin", lambda x: tf.sin(gradient_of(lambda x: tf.gather(x, [[0, 2], [1, 2]], axis=1))(x)), N34)
add("GatherNd", lambda i, w: tf.gather_nd(w, _int(i)), ("n", 3, 1), (5, 2), **LABELS)
add_once("GatherNd", lambda x: tf.gather_nd(x, [[0, 1], [0, 2]]), N3)

add("GatherV2", lambda i, w: tf.gather(w, _int(i)), N3, (5, 2), **LABELS)
add("GatherV2", lambda i, w: tf.gather(w, _int(i), axis=1), N3, (2, 5), **LABELS)
add("GatherV2", lambda x: tf.gather(x, [2, 0], axis=1), N34)
add("GatherV2", lambda x: tf.gather(x, [[2, 0]], axis=0), T3N4)
add("GatherV2", lambda x, i: tf.gather(x, _int(i), axis=1, batch_dims=1), ("n", 5, 2), N3, **LABELS)
add("GatherV2", lambda x, i: tf.gather(x, _int(i) % tf.shape(x)[0]), N3, N, divided=None, **LABELS)
add("GatherV2", lambda x: tf.gather(tf.reduce_sum(x, 0), [1]), N3)
add_once("GatherV2", lambda x: tf.gather(x, [0], axis=0), N34)
add_once("GatherV2", lambda x, i: tf.gather(x, _int(i), axis=1), ("n", 5), N, **LABELS)
add_once("GatherV2", lambda i: tf.gather(tf.reduce_sum(i, 0), _int(i)), N3, **LABELS)
add_once("GatherV2", lambda x: tf.gather(x, [[0, 1], [2, 0], [1, 1]], axis=2, batch_dims=1), T3N4)
add_once("GatherV2", lambda i, w: tf.gather(w, _total(i)), N3, (5, 2), **LABELS)
add_once("GatherV2", lambda x: tf.gather(x, tf.argsort(x[:, 0])), N3)
add_once("GatherV2", lambda i: tf.gather(tf.transpose(tf.sort(i, 0)), _total(i)), N3, **LABELS)
add_once("GatherNd", lambda i, w: tf.gather_nd(w, _total(i)), N3, (5, 2, 3), **LABELS)

# Indices that begin with the number of their row.
add("GatherNd", lambda x, i: tf.gather_nd(x, _each(x, i)), N3, N, **LABELS)
add("GatherNd", lambda x: tf.gather_nd(x, _numbers(x)[:, None]), N34)
add("ScatterNd", gradient_of(lambda x, i: tf.gather_nd(x, _each(x, i))), N3, N, **LABELS)
for change in ("add", "max", "min", "sub", "update"):
    function = getattr(tf, f"tensor_scatter_nd_{change}")
    add(
        f"TensorScatter{change.capitalize()}",
        lambda x, y, i, function=function: function(x, _each(x, i), y),
        N3, N, N, **LABELS,
    )  # fmt: skip
add_once(
    "GatherNd", lambda x, i: tf.gather_nd(x, _each(x, i)[:, ::-1] * [0, 1]), ("n", 12), N, **LABELS
)
add_once("GatherNd", lambda x: tf.gather_nd(x, tf.stack([_numbers(x) % 2, _numbers(x) % 3], 1)), N3)
add_once("GatherNd", lambda x: tf.gather_nd(x, tf.maximum(_numbers(x) - 1, 0)[:, None]), N3)
add_once("GatherNd", lambda x: tf.gather_nd(x, (tf.range(1, tf.shape(x)[0] + 1) - 1)[:, None]), N3)
add_once("GatherNd", lambda x: tf.gather_nd(tf.transpose(x), _int(tf.zeros_like(x[:, :2]))), N3)
add_once(
    "GatherNd", lambda x: tf.gather_nd(x, tf.transpose(_each(x, tf.zeros_like(x[:, 0])))[:, :1]), N3
)
add_once("ScatterNd", lambda x: tf.scatter_nd(_numbers(x)[:, None], x, [100, 3]), N3)
add_once(
    "TensorScatterAdd",
    lambda x, y: tf.tensor_scatter_nd_add(y, _numbers(x)[:1, None], x[:1]),
    N3,
    (3, 3),
)

# A place below k, behind k times the number of the row.
add("ScatterNd", gradient_of(lambda x: tf.sort(x, 1)), N3)
add("ScatterNd", gradient_of(lambda x: tf.math.top_k(x, 2).values), N34)
add("Sin", lambda x: _sum(x[:, :2], _largest(x) + _numbers(x, 3)[:, None], 3), N3)
add("Sin", lambda x: _sum(x[:, :2], _largest(x) + _numbers(x, 4)[:, None], 4), N3)
add("Sin", lambda x: _sum(x[:, :2], _largest(x) + tf.range(2) + _numbers(x, 4)[:, None], 4), N3)
add("Sin", lambda x: _sum(tf.reshape(x, [-1]), tf.range(3 * tf.shape(x)[0]), 1), N3)
add_once("Sin", lambda x: _sum(x[:, :2], _largest(x) + _numbers(x, 2)[:, None], 3), N3)
add_once(
    "Sin",  # no rule can know that the fourth number is never the largest
    lambda x: _sum(x[:, :2], _largest(tf.pad(x, [[0, 0], [0, 1]], constant_values=-99)) + _numbers(x, 3)[:, None], 3),
    N3, extremes=(),
)  # fmt: skip
add_once("Sin", lambda x: _sum(x[:, :2], _largest(x) - _numbers(x, -3)[:, None], 3), N3)
add_once("Sin", lambda x: _sum(x[:, 0], tf.minimum(_numbers(x, 3), 5), 3), N3)
add_once(
    "Sin",  # "m" may be smaller than the places
    lambda x, y: _sum(
        x[:, :2], _largest(x) + _numbers(x, tf.shape(y)[1])[:, None], tf.shape(y)[1]
    ),
    N3, ("n", "m"),
)  # fmt: skip
add_once("Sin", lambda x: _sum(x, _int(tf.cast(_numbers(x), tf.uint8)), 1), N3)

add_once("Sin", lambda x, i: _sum(x, _int(i) * 1 + _numbers(x, 5), 5), N3, N, **LABELS)
add_once("Sin", lambda x, i: _sum(x, _numbers(x) * _int(i), 3), N3, N, **LABELS)
add_once("Sin", lambda x: _sum(x[:, :2], _pairs(x, 2) * [1, 1], 2), N3)
add_once("Sin", lambda x: _sum(x[:, 0], tf.range(-1, tf.shape(x)[0] - 1), 1), N3)
add_once("Sin", lambda x: _sum(x[:, 0], _numbers(x)[::-1], 1), N3)
add_once("Sin", lambda x: _sum(x[:, 0], tf.range(2 * tf.shape(x)[0])[tf.shape(x)[0] :], 2), N3)
add_once("Sin", lambda x: _sum(x, _numbers(x, 6)[:, None] - _pairs(x, 3), 3), N3)
add_once("Sin", lambda x: _sum(x, _numbers(x, 6)[:, None] + -1 * _pairs(x, 3), 3), N3)
add_once(
    "Sin",
    lambda x: _sum(
        x, _numbers(x, 6)[:, None] + tf.reshape(tf.range(0, -3 * tf.shape(x)[0], -1), [-1, 3]), 3
    ),
    N3,
)
for twice in (
    lambda x: _numbers(x) + 0 * tf.range(2)[:, None],
    lambda x: _numbers(x)[None] + 0 * tf.range(2)[:, None],
):
    add_once(
        "Sin",
        lambda x, twice=twice: tf.sin(tf.math.unsorted_segment_sum(
            tf.reshape(x[:, :2], [-1]), tf.reshape(twice(x), [-1]), tf.shape(x)[0]
        )),
        N3,
    )  # fmt: skip
add_once(
    "ScatterNd",
    lambda x, i: tf.scatter_nd(_int(i)[:, None], x, [3 * tf.shape(x)[0], 3]),
    N3,
    N,
    **LABELS,
)
add_once(
    "TensorScatterAdd",
    lambda x, y, i: tf.tensor_scatter_nd_add(x, _each(x, i)[None], y[None]),
    N3,
    N,
    N,
    **LABELS,
)
add_once(
    "TensorScatterAdd",
    lambda x, y: tf.tensor_scatter_nd_add(x, _numbers(x)[None, :, None], y[None]),
    N3,
    N3,
)
add_once(
    "TensorScatterAdd",
    lambda x, y, i: tf.tensor_scatter_nd_add(y, _int(i)[:, None], x),
    N3,
    (3, 3),
    N,
    **LABELS,
)


def _flat(x, numbers):
    """What a lookup in the flat tensor finds."""
    return tf.gather(tf.reshape(x, [-1]), numbers)


add("GatherV2", lambda x: _flat(x, tf.argmax(x, 1, output_type=tf.int32) + _numbers(x, 3)), N3)
add("GatherV2", lambda x: _flat(x, tf.tile(_numbers(x, 3)[:, None], [1, 2])), N3)
add("GatherNd", lambda x: tf.gather_nd(x, tf.repeat(_numbers(x)[:, None], 2, 1)[..., None]), N3)
add("Sin", lambda x: tf.sin(gradient_of(lambda x: _sum(x, _pairs(x, 3), 3))(x)), N3)
add("GatherV2", lambda x: tf.gather(tf.sort(x, 0), _numbers(x) + 0 * tf.argmax(x, 1, tf.int32)), N3)
add_once("GatherV2", lambda x: tf.gather(x, tf.tile(_numbers(x), [2])), N3)
add_once("GatherV2", lambda x: tf.gather(x, tf.maximum(_numbers(x) - 1, 0)), N3)


def _gradient(x, i, batch_dims):
    """Of a lookup within rows."""

    def look_up(x):
        return tf.gather(x, _int(i), batch_dims=batch_dims, axis=batch_dims)

    return tf.sin(gradient_of(look_up)(x))


add("Sin", lambda x, i: _gradient(x, i, 1), N34, ("n", 5), **LABELS)
add("Sin", lambda x, i: _gradient(x, i, 2), N34, ("n", 3, 5), **LABELS)
add("Sin", lambda x, i: _gradient(x, i, 1), ("n", "m", 2), ("n", 5), **LABELS)


@pytest.mark.parametrize(
    "cases", CASES.groups, ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_an_operation_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_has_a_case_that_is_divided():
    assert kinds_without(RULES, indices, CASES) == set()
