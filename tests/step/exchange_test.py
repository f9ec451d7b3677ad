"""The plan of the tree over workers; what is exchanged is in conformance/workers_test.py."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from towers.workers.cluster import Cluster
from towers.step.averaging import add_subtrees, add_tree, partial_sums, subtrees
from towers.step.exchange import fingerprint, make_exchange, towers_of

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
