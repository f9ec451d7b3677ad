"""Holds the private names of Keras' data adapters and of tf.data that a resumed fit needs.

All exist in Keras 3.10 to 3.15 and in TensorFlow 2.20 and 2.21.
"""

from typing import Any

import tensorflow as tf
from keras.src.trainers.data_adapters import get_data_adapter
from keras.src.trainers.data_adapters.array_data_adapter import can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import train_validation_split


def data_adapter(**arguments: object) -> Any:
    """Returns the object in which Keras' `fit` puts its data; `fit` also takes it as `x`.

    It has `num_batches`, `get_tf_dataset()`, `on_epoch_begin()` and `on_epoch_end()`.
    """
    return get_data_adapter(**arguments)


def are_arrays(*parts: object) -> bool:
    """Returns whether Keras reads x, y and sample_weight as arrays or structures of arrays."""
    return bool(can_convert_arrays(parts))


def split_arrays(parts: tuple, share: float) -> tuple[tuple, tuple]:
    """Splits arrays as `validation_split` does: the last `share` of the rows is for validation."""
    first, last = train_validation_split(parts, validation_split=share)
    return first, last


def dataset_parts(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """Returns a dataset and all the datasets that it reads, each once."""
    found = {id(dataset): dataset}
    left = [dataset]
    while left:
        for value in _attributes(left.pop()):
            if isinstance(value, tf.data.Dataset) and id(value) not in found:
                found[id(value)] = value
                left.append(value)
    return list(found.values())


def dataset_graphs(dataset: tf.data.Dataset) -> list[tf.Graph]:
    """Returns the graphs of the functions that one dataset calls, as `map` does."""
    functions: list[object] = [getattr(value, "function", None) for value in _attributes(dataset)]
    return [function.graph for function in functions if hasattr(function, "graph")]


def _attributes(dataset: tf.data.Dataset) -> list[object]:
    """Returns what the attributes of a dataset hold: other datasets, and wrapped functions."""
    return tf.nest.flatten(list(vars(dataset).values()))


def dataset_seeds(dataset: tf.data.Dataset) -> tuple[int, int] | None:
    """Returns the two seeds of a `shuffle` or a `random`, (0, 0) without one; else None."""
    seeds = [getattr(dataset, name, None) for name in ("_seed", "_seed2")]
    if any(seed is None for seed in seeds):
        return None
    first, second = (int(seed) for seed in seeds)  # type: ignore[arg-type]
    return first, second


def begins_again(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset makes iterators of what it reads only while it is read.

    `repeat` begins its input again, and the second part of `concatenate` begins after the first.
    """
    return type(dataset).__name__.lstrip("_") not in _BEGIN_ONCE


def reshuffles(dataset: tf.data.Dataset) -> bool:
    """Returns whether a dataset draws another order for each iterator."""
    return bool(getattr(dataset, "_reshuffle_each_iteration", False))


# These begin their inputs once, when an iterator is made.
_BEGIN_ONCE = frozenset(
    {
        "AssertCardinalityDataset",
        "BatchDataset",
        "DenseToRaggedDataset",
        "FilterDataset",
        "FixedLengthRecordDataset",
        "FixedLengthRecordDatasetV2",
        "FlatMapDataset",
        "IgnoreErrorsDataset",
        "InterleaveDataset",
        "ListDataset",
        "MapAndBatchDataset",
        "MapDataset",
        "OptionsDataset",
        "PaddedBatchDataset",
        "ParallelBatchDataset",
        "ParallelInterleaveDataset",
        "ParallelMapDataset",
        "ParseExampleDataset",
        "PrefetchDataset",
        "RangeDataset",
        "ShardDataset",
        "ShuffleDataset",
        "SkipDataset",
        "SparseTensorSliceDataset",
        "TakeDataset",
        "TensorDataset",
        "TensorSliceDataset",
        "TextLineDataset",
        "TextLineDatasetV2",
        "TFRecordDataset",
        "TFRecordDatasetV2",
        "UnbatchDataset",
        "UniqueDataset",
        "ZipDataset",
    }
)
