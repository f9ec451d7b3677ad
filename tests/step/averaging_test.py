"""One tree of additions, the same on whichever device or worker a tower is; then one update.

What workers exchange is in conformance/workers_test.py; policy_test counts what devices send.
"""

import hashlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tests import processes
from tests.processes import ROOT
from towers.machine import devices
from towers.step.averaging import add_subtrees, add_tree, partial_sums, subtrees
from towers.step.exchange import fingerprint, make_exchange, towers_of
from towers.step.transfers import transfer
from towers.step.update import update
from towers.workers.cluster import Cluster


def tower_sum(values, num_devices, add_on_devices=True):
    names = devices.tower_devices(num_devices, "cpu")
    placed = devices.place_towers(len(values), names)
    tree = partial_sums([[v] for v in values], placed, add_on_devices=add_on_devices)
    return add_tree(tree)[0]


def by_hand(values):
    """The balanced tree, in NumPy: the first half, rounded up, plus the second."""
    if len(values) == 1:
        return values[0]
    middle = (len(values) + 1) // 2
    return by_hand(values[:middle]) + by_hand(values[middle:])


@pytest.mark.parametrize("num_towers", [1, 2, 3, 5, 6, 8, 13])
def test_the_sum_has_the_bits_of_the_balanced_tree_on_any_number_of_devices(num_towers):
    rng = np.random.default_rng(num_towers)
    values = [rng.normal(size=100).astype("float32") * 10.0 ** rng.integers(-3, 4)
              for _ in range(num_towers)]
    expected = by_hand(values)
    tensors = [tf.constant(v) for v in values]
    for num_devices in (1, 2, 3, 4, 8):
        np.testing.assert_array_equal(tower_sum(tensors, num_devices), expected)
        np.testing.assert_array_equal(tower_sum(tensors, num_devices, False), expected)


def test_sparse_gradients_are_joined_in_tower_order():
    def slices(value, index):
        return tf.IndexedSlices(tf.constant([[value]]), tf.constant([index]), tf.constant([4, 1]))

    total = tower_sum([slices(1.0, 2), slices(2.0, 0), slices(4.0, 2)], 2)
    assert total.values.numpy().tolist() == [[1.0], [2.0], [4.0]]
    assert total.indices.numpy().tolist() == [2, 0, 2]
    np.testing.assert_array_equal(tf.convert_to_tensor(total), [[2.0], [0.0], [5.0], [0.0]])


# Workers

counts = st.integers(1, 40).flatmap(lambda t: st.tuples(st.integers(1, t), st.just(t)))


@given(counts)
def test_every_tower_is_one_workers_in_order_and_sizes_differ_by_at_most_1(sizes):
    num_workers, num_towers = sizes
    owned = [towers_of(w, num_workers, num_towers) for w in range(num_workers)]
    assert [t for towers in owned for t in towers] == list(range(num_towers))
    assert max(map(len, owned)) - min(map(len, owned)) <= 1


def owners(num_workers, num_towers):
    return [w for w in range(num_workers) for _ in towers_of(w, num_workers, num_towers)]


@given(counts)
def test_subtrees_of_workers_make_the_additions_of_the_one_tree(sizes):
    """In float32, where another order of additions gives other bits."""
    num_workers, num_towers = sizes
    values = np.random.default_rng(num_towers).normal(size=num_towers).astype("float32")
    alone = [[tf.constant(value)] for value in values]
    found = subtrees(owners(num_workers, num_towers))
    sums = {
        towers: add_tree(partial_sums(
            alone[towers.start:towers.stop], ["/cpu:0"] * len(towers), add_on_devices=True,
        ))[0] for _, towers in found
    }
    (expected,) = add_tree(partial_sums(alone, ["/cpu:0"] * num_towers, add_on_devices=False))
    assert add_subtrees(sums, range(num_towers)) == expected
    for worker in range(num_workers):
        own = [tower for owner, towers in found if owner == worker for tower in towers]
        assert own == list(towers_of(worker, num_workers, num_towers))


def test_each_worker_needs_a_tower():
    workers = Cluster(("a:1", "b:1", "c:1"), 0)
    with pytest.raises(ValueError, match=r"num_towers \(2\) must be at least .* workers, 3"):
        make_exchange(workers, 2)


X = np.arange(600, dtype="float32").reshape(6, 100)


@pytest.mark.parametrize("other", [
    X[::-1], X[:5], X + 1, np.where(X == 96, 7, X).astype("float32"),
], ids=["order", "fewer", "values", "one_value"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16", "string"])
def test_another_batch_has_another_fingerprint(other, dtype):
    def batch(x):
        values = x.astype(str) if dtype == "string" else x.astype(dtype)
        return {"x": tf.constant(values)}, tf.range(len(x)), None

    assert np.array_equal(fingerprint(batch(X)), fingerprint(batch(X.copy())))
    assert not np.array_equal(fingerprint(batch(X)), fingerprint(batch(other)))


def test_a_move_packs_the_tensors_of_a_dtype_and_keeps_every_value():
    """The bits of not a number, of -infinity, of -0 and of the smallest numbers, too."""
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([3, 2]))
    odd = np.array([[0x7FC00001, 0xFF800000, 0x80000000, 1]], np.uint32).view(np.float32)
    values = [tf.constant(odd), tf.constant(7), None, tf.constant(3.5), slices]

    @tf.function
    def moved():
        arrived = transfer(values, "/cpu:0", "/cpu:1", packed=True)
        return [v for v in arrived if isinstance(v, tf.Tensor)]

    for got, wanted in zip(moved(), [values[0], values[1], values[3]], strict=True):
        assert got.dtype == wanted.dtype and got.shape == wanted.shape
        assert got.numpy().tobytes() == wanted.numpy().tobytes()
    assert transfer(values, "/cpu:0", "/cpu:1", packed=True)[4] is slices
    operations = moved.get_concrete_function().graph.get_operations()
    assert sum(op.type == "ConcatV2" for op in operations) == 1  # of the two float32


# The last two arrows: the additions that are left, and one update


def variables_and_optimizer(optimizer, shape=(2,)):
    """Of the variables, the first is [1, 2]."""
    variables = [keras.Variable(np.arange(1, 1 + np.prod(shape)).reshape(shape), dtype="float32"),
                 keras.Variable(np.zeros([1]), dtype="float32")]
    optimizer.build(variables)
    return variables, optimizer


def of_tower(loss, first, second, statistic):
    return [tf.constant(v) for v in (loss, first, second, statistic)]


@pytest.fixture
def tree():
    """Three towers, (0 + 1) + 2: loss 7; gradients [6, 8] and [3]; a statistic 111."""
    return ((of_tower(1.0, [1.0, 2.0], [1.0], 1.0), of_tower(2.0, [2.0, 2.0], [1.0], 10.0)),
            of_tower(4.0, [3.0, 4.0], [1.0], 100.0))


@pytest.mark.parametrize("is_added", [False, True])
def test_the_update_is_one_compiled_program_with_what_is_left_to_add(tree, is_added):
    variables, optimizer = variables_and_optimizer(keras.optimizers.SGD(1.0))

    @tf.function(autograph=False)
    def run():
        return update(add_tree(tree) if is_added else tree, optimizer, variables)[0]

    operations = run.get_concrete_function().graph.get_operations()
    (call,) = [op for op in operations if "PartitionedCall" in op.type]
    assert "_update_program_" in call.get_attr("f").name
    assert call.get_attr("_XlaMustCompile")


def test_a_variable_on_another_device_is_read_where_it_is(tree):
    """TensorFlow's own, such as a rate that a callback assigns."""
    with tf.device("/cpu:3"):
        rate = tf.Variable(0.5)
    variables, optimizer = variables_and_optimizer(keras.optimizers.SGD(lambda: rate))

    @tf.function
    def step():
        with tf.device("/cpu:0"):
            update(tree, optimizer, variables)

    for value in (0.5, 0.25):
        rate.assign(value)
        step()
    assert variables[1].numpy().tolist() == [-0.5 * 3 - 0.25 * 3]


def large_update():
    """Updates 3 million parameters by clipped gradients.

    Returns: a digest of them, and the parts that XLA cuts the loop over the largest into.
    """
    rng = np.random.default_rng(0)
    variables, optimizer = variables_and_optimizer(
        keras.optimizers.Adam(0.1, global_clipnorm=1.0), (3000, 1000)
    )
    towers = [
        [tf.zeros([]), *(tf.constant(rng.normal(size=v.shape), tf.float32) for v in variables)]
        for _ in range(2)
    ]

    @tf.function(autograph=False, jit_compile=True)
    def run():
        return update(tuple(towers), optimizer, variables)[0]

    for _ in range(3):
        run()
    compiled = run.experimental_get_compiler_ir()(stage="optimized_hlo")
    parts = re.findall(r'outer_dimension_partitions":\["(\d+)"', compiled)
    values = b"".join(v.numpy().tobytes() for v in [*variables, *optimizer.variables])
    return hashlib.sha256(values).hexdigest(), max(map(int, parts), default=1)


@pytest.mark.skipif(devices.count_cores() < 2, reason="one core has no loop to share")
def test_the_program_is_cut_among_tensorflows_threads_and_its_bits_stay():
    command = ("import tensorflow as tf; tf.config.threading.set_intra_op_parallelism_threads(2); "
               "from tests.step.averaging_test import large_update; print(*large_update())")
    done = processes.run("-c", command, cwd=ROOT)
    alone, one = large_update()  # the tests' threads: one
    assert one == 1 and done.stdout.split() == [alone, "2"], done.stderr[-2000:]
