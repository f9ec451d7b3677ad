"""One tree of additions, the same on whichever device or worker a tower is; then one update.

What workers exchange is in conformance/workers_test.py; policy_test counts what devices send.
"""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from towers.machine import devices
from towers.machine.devices import CPU, GPU
from towers.step.averaging import add_subtrees, add_tree, partial_sums, subtrees
from towers.step.exchange import fingerprint, make_exchange, towers_of
from towers.step.transfers import transfer
from towers.workers.cluster import Cluster


def tower_sum(values, num_devices, policy=GPU):
    names = devices.tower_devices(num_devices, "cpu")
    placed = devices.place_towers(len(values), names)
    tree = partial_sums([[v] for v in values], placed, policy)
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
    values = [
        rng.normal(size=100).astype("float32") * 10.0 ** rng.integers(-3, 4)
        for _ in range(num_towers)
    ]
    expected = by_hand(values)
    tensors = [tf.constant(v) for v in values]
    for num_devices in (1, 2, 3, 4, 8):
        np.testing.assert_array_equal(tower_sum(tensors, num_devices), expected)
        np.testing.assert_array_equal(tower_sum(tensors, num_devices, CPU), expected)


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
        towers: add_tree(
            partial_sums(
                alone[towers.start : towers.stop],
                ["/cpu:0"] * len(towers),
                GPU,
            )
        )[0]
        for _, towers in found
    }
    (expected,) = add_tree(partial_sums(alone, ["/cpu:0"] * num_towers, CPU))
    assert add_subtrees(sums, range(num_towers)) == expected
    for worker in range(num_workers):
        own = [tower for owner, towers in found if owner == worker for tower in towers]
        assert own == list(towers_of(worker, num_workers, num_towers))


def test_each_worker_needs_a_tower():
    workers = Cluster(("a:1", "b:1", "c:1"), 0)
    with pytest.raises(ValueError, match=r"num_towers \(2\) must be at least .* workers, 3"):
        make_exchange(workers, 2)


X = np.arange(600, dtype="float32").reshape(6, 100)


@pytest.mark.parametrize(
    "other",
    [
        X[::-1],
        X[:5],
        X + 1,
        np.where(X == 96, 7, X).astype("float32"),
    ],
    ids=["order", "fewer", "values", "one_value"],
)
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
