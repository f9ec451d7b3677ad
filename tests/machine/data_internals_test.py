"""A test for each private part of Keras' data adapters and of tf.data that towers uses."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.machine import data_internals

X = np.arange(8.0)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (X[4 * index : 4 * index + 4],)


def dataset():
    return tf.data.Dataset.from_tensor_slices(X).batch(4)


@pytest.mark.parametrize("make", [X.copy, Batches, dataset])
def test_data_adapter(make):
    x = make()
    adapter = data_internals.data_adapter(x=x, batch_size=4, shuffle=False)
    assert adapter.num_batches == 2
    adapter.on_epoch_begin()
    found = [np.ravel(batch) for batch in adapter.get_tf_dataset()]
    adapter.on_epoch_end()
    assert np.concatenate(found).tolist() == X.tolist()
    assert data_internals.data_adapter(x=adapter) is adapter


def test_are_arrays():
    for parts in ((X,), ({"a": X, "b": [tf.constant(X)]}, X, None)):
        assert data_internals.are_arrays(*parts)
    for other in (Batches(), [[1.0, 2.0]], "text"):
        assert not data_internals.are_arrays(other)


def test_split_arrays():
    (x, y, weight), (last, _, _) = data_internals.split_arrays((X, 2 * X, None), 0.25)
    assert (len(x), len(y), weight, last.tolist()) == (6, 6, None, [6.0, 7.0])


def of_range(change=lambda dataset: dataset):
    return change(tf.data.Dataset.range(4))


def test_dataset_parts():
    one = of_range()
    other = one.shuffle(2, seed=1)
    both = tf.data.Dataset.zip((one, other))
    assert data_internals.dataset_parts(both) == [both, one, other]


def test_dataset_graphs():
    graphs = data_internals.dataset_graphs(of_range(lambda d: d.map(lambda v: tf.math.exp(1.0))))
    assert [any(op.type == "Exp" for op in g.get_operations()) for g in graphs] == [True]
    assert data_internals.dataset_graphs(of_range()) == []


def test_dataset_seeds():
    seeds = [
        data_internals.dataset_seeds(of_range(lambda d, seed=seed: d.shuffle(2, seed=seed)))
        for seed in (1, 2, None)
    ]
    assert len(set(seeds)) == 3
    assert data_internals.dataset_seeds(tf.data.Dataset.random(3)) is not None
    assert data_internals.dataset_seeds(of_range()) is None


def test_reshuffles():
    for again in (True, False):
        dataset = of_range(lambda d, a=again: d.shuffle(2, 1, reshuffle_each_iteration=a))
        assert data_internals.reshuffles(dataset) is again
    assert not data_internals.reshuffles(of_range())


def test_begins_again():
    for name, options in {
        "shuffle": (2,),
        "batch": (2,),
        "padded_batch": (2,),
        "ragged_batch": (2,),
        "take": (1,),
        "skip": (1,),
        "shard": (2, 0),
        "prefetch": (1,),
        "ignore_errors": (),
        "unique": (),
        "map": (lambda v: v,),
        "filter": (lambda v: v > 1,),
        "enumerate": (),
        "flat_map": (tf.data.Dataset.range,),
        "interleave": (tf.data.Dataset.range,),
    }.items():
        assert not data_internals.begins_again(getattr(of_range(), name)(*options)), name
    for name, options in {
        "repeat": (2,),
        "cache": (),
        "concatenate": (of_range(),),
        "window": (2,),
    }.items():
        assert data_internals.begins_again(getattr(of_range(), name)(*options)), name
