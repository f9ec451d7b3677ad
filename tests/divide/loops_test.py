"""Every rule of loops, conditions and lists by itself: whole and divided among towers."""

from collections.abc import Callable

import pytest
import tensorflow as tf

from tests.divide.whole_and_divided import N3, N34, R, T3N4, Cases, assert_alike, gradient_of
from towers.divide.lists import LISTS

CASES = Cases()
add, add_once = CASES.add, CASES.add_once
LOOP, BRANCH = "StatelessWhile", "StatelessIf"


def repeat(body: Callable, *start: tf.Tensor, turns: int = 3, **options) -> tf.Tensor:
    """Returns the first loop variable after some turns."""
    found = tf.while_loop(
        lambda i, *_: i < turns, lambda i, *v: (i + 1, *body(*v)), (0, *start), **options
    )
    return found[1]


def recurrent(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Returns the states of a recurrent layer: rows x steps x 4."""
    states = tf.scan(lambda h, step: tf.tanh(h @ w + step), tf.transpose(x, [1, 0, 2]),
                     tf.zeros_like(x[:, 0]))  # fmt: skip
    return tf.transpose(states, [1, 0, 2])


W4 = (4, 4)
add(LOOP, lambda x: repeat(lambda x: (tf.tanh(x),), x), N3)
add(LOOP, recurrent, N34, W4)
add(LOOP, gradient_of(recurrent), N34, W4)
add(LOOP, gradient_of(recurrent, 1), N34, W4)
add(LOOP, lambda x: repeat(lambda s: (s + x,), tf.sort(x, 0)), N3)  # whole, cut into rows
add(LOOP, lambda x: repeat(lambda s: (s + x,), tf.zeros_like(x), turns=tf.shape(x)[0]), N3)
add(LOOP, lambda x, y: repeat(lambda x, y: (x + y, y * 2), x, y), N3, (3,))
add(LOOP, lambda x: repeat(lambda s: (s + tf.reduce_sum(x, 0),), tf.zeros([3], x.dtype)), N3)
add(LOOP, lambda x, y: repeat(lambda s: (s + tf.reduce_sum(x, 0),), y), N3, (3,))
add(LOOP, lambda x: repeat(lambda s: (s * 2,), tf.reduce_sum(x, 0)), N3)
add_once(LOOP, lambda x: repeat(lambda s: (tf.sin(s),), tf.reduce_sum(x, 0)), N3)
add_once(LOOP, lambda x: repeat(lambda x: (x - tf.reduce_mean(x, 0),), x), N3)
add_once(LOOP, lambda x: repeat(lambda x: (tf.sort(x, 0),), x), N3)
add_once(LOOP, lambda x: tf.scan(lambda s, row: s + row, x), N3)
add_once(
    LOOP,
    lambda x: tf.while_loop(
        lambda x: tf.reduce_any(tf.abs(x) > 0.3) & tf.reduce_all(tf.math.is_finite(x)),
        lambda x: (x / 2,), (x,),
    ),
    N3, extremes=(),
)  # fmt: skip


def positive(x: tf.Tensor) -> tf.Tensor:
    """Counts the positive elements of each column, several times."""
    found = tf.reduce_sum(tf.cast(x > 0, tf.int32), 0)
    return repeat(lambda total: (total + found,), tf.zeros([3], tf.int32))


def in_python(x: tf.Tensor) -> tf.Tensor:
    """Calls Python in a loop."""

    def turn(x: tf.Tensor) -> tuple:
        return (tf.ensure_shape(tf.numpy_function(abs, [x], x.dtype), [None, 3]),)

    return repeat(turn, x, shape_invariants=OPEN)


add_once(LOOP, positive, N3)
OPEN = (tf.TensorShape([]), tf.TensorShape([None, None]))
add_once(
    LOOP,
    lambda x: repeat(lambda x: (tf.transpose(x),), x, shape_invariants=OPEN),
    ("n", "n"),
)  # fmt: skip
add_once("While", in_python, N3)
add(
    LOOP,
    lambda x, y: repeat(
        lambda x: (tf.cond(tf.reduce_sum(y) > 0, lambda: x * 2, lambda: tf.sin(x)),), x
    ),
    N3, (3,),
)  # fmt: skip
add(LOOP, lambda x: repeat(lambda x: (repeat(lambda x: (tf.tanh(x),), x) + 1,), x), N3)


def branch(first: Callable, second: Callable) -> Callable:
    """Returns a condition of whole values: the sum of the last input, or of rows."""
    return lambda *v: tf.cond(tf.reduce_sum(v[-1]) > 0, lambda: first(*v), lambda: second(*v))


add(BRANCH, branch(lambda x: x * 2, tf.sin), N3)
add(BRANCH, branch(lambda x, y: x + y, lambda x, y: x * y), N3, (3,))
add(BRANCH, branch(lambda x: tf.reduce_sum(x, 0), lambda x: tf.reduce_mean(x, 0)), N3)
add(BRANCH, branch(lambda x, y: tf.reduce_sum(x, 0), lambda x, y: y), N3, (3,))
add(BRANCH, branch(lambda x, y: y, lambda x, y: y), N3, (3,), divided=None)
add_once(BRANCH, branch(lambda x: x, lambda x: tf.reverse(x, [0])), N3)
add_once(BRANCH, branch(lambda x: tf.transpose(x), lambda x: x), ("n", "n"))
add_once(
    BRANCH,
    branch(lambda x: tf.reduce_sum(tf.cast(x, tf.int32), 0), lambda x: tf.zeros([3], tf.int32)),
    N3, extremes=(),
)  # fmt: skip
add(BRANCH, lambda x: tf.cond(tf.shape(x)[0] > 3, lambda: x * 2, lambda: tf.sin(x)), N3)
add_once("If", branch(lambda x: tf.numpy_function(abs, [x], x.dtype), tf.sin), N3)
# A gradient of a gradient adds outputs to functions that are called already.
add(LOOP, gradient_of(gradient_of(recurrent)), N34, W4, divided=None)
add(BRANCH, gradient_of(gradient_of(branch(lambda x: x**3, tf.sin))), N3, divided=None)


def stacked(*elements: tf.Tensor) -> tf.TensorArray:
    """Returns an array of tensors."""
    array = tf.TensorArray(elements[0].dtype, len(elements), element_shape=elements[0].shape)
    for i, element in enumerate(elements):
        array = array.write(i, element)
    return array


def unstacked(x: tf.Tensor) -> tf.TensorArray:
    """Returns an array of the slices along axis 0."""
    return tf.TensorArray(x.dtype, size=tf.shape(x)[0]).unstack(x)


for kind in ("TensorListReserve", "TensorListSetItem", "TensorListStack"):
    add(kind, lambda x, y: stacked(x, y).stack(), N3, N3)
    add(kind, lambda x, y: stacked(x, x + y).stack(), N3, (3,))
    add(kind, lambda x: stacked(x, tf.sort(x, 0)).stack(), N3)  # whole, cut into rows
    add_once(kind, lambda x: stacked(tf.sort(x, 0), x).stack(), N3)
    add(kind, lambda x, y: stacked(tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)).stack(), N3, N3)
    add(kind, lambda x, y: stacked(tf.reduce_sum(x, 0), y).stack(), N3, (3,))
    add(kind, lambda x, y: stacked(y, y * 2).stack()[1] + x, N3, (3,), divided=None)
    add_once(kind, lambda x: stacked(x, tf.transpose(x)).stack(), ("n", "n"))
    if kind != "TensorListStack":
        add_once(kind, lambda x: stacked(x, x).concat(), N3)
for kind in ("TensorListFromTensor", "TensorListGetItem"):
    add(kind, lambda x: unstacked(x).read(1), T3N4)
    add(kind, lambda x: unstacked(tf.reduce_sum(x, 0)).read(1), N34)
    add(kind, lambda x: unstacked(tf.sort(x, 1)).read(1) + x[0], T3N4)
    add(kind, lambda x, y: unstacked(y).read(1) + x, N3, (2, 3), divided=None)
    add_once(kind, lambda x: unstacked(x).read(0), N34)


def times_length(x: tf.Tensor) -> tf.Tensor:
    """Returns a tensor times the number of its slices, which a list of them counts."""
    length = R.TensorListLength(input_handle=unstacked(x).flow)
    return x * tf.cast(length, x.dtype)


add("TensorListLength", times_length, T3N4)
add("TensorListElementShape", gradient_of(lambda x: unstacked(x).read(1)), T3N4)
add_once("TensorListLength", times_length, N3)
add_once(
    "TensorListReserve",
    lambda x: tf.TensorArray(x.dtype, tf.shape(x)[0], element_shape=[3]).write(0, x[0]).stack(),
    N3,
)  # fmt: skip


def pushed(*elements: tf.Tensor) -> tf.Tensor:
    """Returns a list."""
    found = R.EmptyTensorList(
        element_shape=tf.constant(-1), max_num_elements=-1, element_dtype=elements[0].dtype
    )
    for element in elements:
        found = R.TensorListPushBack(input_handle=found, tensor=element)
    return found


def popped(handle: tf.Tensor, like: tf.Tensor) -> tuple:
    """Returns a list without its last element, and the element."""
    return R.TensorListPopBack(
        input_handle=handle, element_shape=tf.constant(-1), element_dtype=like.dtype
    )


def last_two(*elements: tf.Tensor) -> list[tf.Tensor]:
    """Returns the last two elements of a list, read from its end."""
    rest, last = popped(pushed(*elements), elements[0])
    return [last, popped(rest, elements[0])[1]]


for kind in ("EmptyTensorList", "TensorListPushBack", "TensorListPopBack"):
    add(kind, lambda x, y: last_two(x, y), N3, N3)
    add_once(kind, lambda x: last_two(tf.sort(x, 0), x), N3)
    add(kind, lambda x: last_two(x, tf.sort(x, 0)), N3)
    add(kind, lambda x, y: last_two(tf.reduce_sum(x, 0), tf.reduce_sum(y, 0)), N3, N3)
    add(kind, lambda x, y: last_two(tf.reduce_sum(x, 0), y), N3, (3,))
    add(kind, lambda x, y: [z + x for z in last_two(y, y * 2)], N3, (3,), divided=None)
    add(kind, lambda x: last_two(tf.shape(x), tf.shape(x)), N3, divided=None)
    add(kind, lambda x: last_two(tf.shape(x), tf.shape(x)[::-1]), N3, divided=None)
    add(kind, lambda x: last_two(tf.shape(x), tf.cast(x[0], tf.int32)), N3, divided=None)


def patches(x: tf.Tensor) -> list[tf.Tensor]:
    """Returns sums of rows and of halves of rows, which are elements of one array."""
    array = tf.TensorArray(x.dtype, 3, infer_shape=False)
    for i, element in enumerate((x, tf.reshape(x, [-1, 2]), x)):
        array = array.write(i, element)
    return [tf.reduce_mean(array.read(i) ** 2) for i in range(3)]


add("TensorListSetItem", patches, ("n", 4), divided=None)
add("TensorListSetItem", gradient_of(lambda x: tf.stack(patches(x))), ("n", 4), divided=None)


@pytest.mark.parametrize(
    "cases", CASES.groups, ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_it_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_of_lists_has_a_case_that_is_divided():
    divided = {case.kind for case in CASES if case.divided}
    assert set(LISTS) - divided == {"ZerosLike", "Identity", "AddN", "StopGradient"}
