"""Checks models, arguments and batches before a step, and raises one-line errors."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers import __version__
from towers.machine.devices import HOST
from towers.machine.keras_internals import all_layers
from towers.step.raw_variables import RawVariable
from towers.step.sharding import Placed, shard_sizes
from towers.step.digests import variable_digest
from towers.step.structures import Structure
from towers.workers.workers import Workers


def check_model(model: keras.Model) -> None:
    """Raises ValueError for a model that towers cannot compute."""
    if not model.built:
        raise ValueError(
            f"model {model.name!r} is not built: its variables do not exist yet. Give it a "
            "keras.Input, or call it on a batch first."
        )
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"layer {layer.name!r} is stateful=True: its state belongs to the rows of one "
                "batch, which towers divide. Use stateful=False."
            )


def check_agreement(
    cluster: Workers, variables: Sequence[RawVariable], settings: Mapping[str, object]
) -> None:
    """Raises ValueError if workers differ in versions, settings or the values of variables."""
    if cluster.num_workers > 1:
        cluster.check_same(
            {
                "towers' version": __version__,
                "TensorFlow's version": tf.__version__,
                "Keras' version": keras.__version__,
                **settings,
                **{
                    f"variable {i} {v.path.rpartition('/')[2]}": variable_digest(v)
                    for i, v in enumerate(variables)
                },
            }
        )


def check_counts(num_towers: int, batch_size: int | None, noise_scale: bool) -> None:
    """Raises ValueError if there are too few towers or examples in a full batch."""
    if noise_scale and num_towers < 2:
        raise ValueError("noise_scale needs two towers: give num_towers=2 or more.")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size ({batch_size}) must be at least 1.")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raises ValueError if an argument is not one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name} ({value!r}) must be one of {', '.join(allowed)}.")


class BatchInCode(ValueError):
    """Signals that a model or a loss has a fixed batch size in its code."""


_PARTS = ("x", "y", "sample_weight")
_DIFFER = "the parts of a batch differ in their number of rows: "
_REMEDY = ". Give one row for each example in every part."
_SAID = re.compile(r"(?s)the parts of a batch .*?every part\.")
_SCALAR = "none (a scalar)"


def check_rows(*batch: Structure) -> None:
    """Raises ValueError if x, y and sample_weight are known to differ in their number of rows."""
    known = {_rows(part) for part in tf.nest.flatten(batch) if part is not None} - {None}
    if len(known) > 1 or _SCALAR in known:
        check_arrays(*batch)
        rows = [(name, _rows(part)) for name, part in _named_parts(batch)]
        listed = ", ".join(f"{name} {'?' if n is None else n}" for name, n in rows)
        raise ValueError(_DIFFER + listed + _REMEDY)


def check_arrays(*batch: Structure) -> None:
    """Raises ValueError for lists of numbers: TensorFlow would make a tensor of each number."""
    for name, part in zip(_PARTS, batch):
        numbers = (isinstance(v, bool | int | float | np.generic) for v in tf.nest.flatten(part))
        if isinstance(part, list | tuple | dict) and any(numbers):
            raise ValueError(
                f"{name} is a {type(part).__name__} of numbers; a batch is an array or a tensor of "
                f"N rows, or a structure of these. Pass numpy.asarray({name})."
            )


@contextmanager
def checked_rows(*batch: Structure) -> Iterator[None]:
    """Makes operations of the with block wait for a check of row counts; see `readable`."""
    check_rows(*batch)
    named, assertions = _named_parts(batch), []
    if len(named) > 1 and any(_rows(part) is None for _, part in named):
        with tf.device(HOST):
            counts = [tf.cast(tf.shape(part)[0], tf.int32) for _, part in named]
            said: list[str | tf.Tensor] = []
            for (name, _), count in zip(named, counts, strict=True):
                said += [f"{', ' if said else _DIFFER}{name} ", count]
            same = tf.reduce_all(tf.equal(tf.stack(counts), counts[0]))
            assertions = [tf.debugging.Assert(same, [*said, _REMEDY])]
    with tf.control_dependencies(assertions):
        yield


@contextmanager
def readable() -> Iterator[None]:
    """Converts the InvalidArgumentError of a row check in the graph to a one-line ValueError."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        found = _SAID.search(error.message)
        if not found:
            raise
        # TensorFlow prints an assertion's data as "[text] [16] [text] [20] [text]", escaped.
        raise ValueError(found[0].replace("] [", "").replace("\\", "")) from None


def check_placed(placed: Placed, batch: Structure, num_towers: int, local_towers: range) -> None:
    """Raises ValueError if the rows of `placed`, the shards of this worker, do not fit a batch."""
    if placed is None:
        return
    check_rows(batch)
    num_examples = next(_rows(part) for part in tf.nest.flatten(batch) if part is not None)
    sizes = shard_sizes(num_examples or 0, num_towers)
    for tower, shard in zip(local_towers, placed, strict=True):
        expected = max(sizes[tower], 1)  # a tower without examples has one row
        found = {_rows(v) for v in tf.nest.flatten(shard) if v is not None}
        if found != {expected}:
            raise ValueError(
                f"placed: the shard of tower {tower} has {'/'.join(map(str, found))} rows; of "
                f"{num_examples} examples it has {expected}. Pass what towers.prefetched makes."
            )


def _rows(part: tf.Tensor | np.ndarray) -> Any:
    """Returns the number of rows of a tensor or array; None if only the graph knows it."""
    try:
        return len(part)  # 10 times as fast as reading the shape of an array or an eager tensor
    except TypeError:
        shape = tf.TensorShape(getattr(part, "shape", ()))
        if shape.rank == 0:
            return _SCALAR
        return shape[0]


def _named_parts(batch: Sequence[Structure]) -> list[tuple[str, tf.Tensor]]:
    """Returns the present parts of a batch, with names: ("x", tensor), ("y['a']", tensor)."""
    return [
        (_PARTS[first] + "".join(f"[{key!r}]" for key in path), part)
        for (first, *path), part in keras.tree.flatten_with_path(batch)
        if part is not None
    ]


def check_loss_scale(optimizer: keras.optimizers.Optimizer) -> None:
    """Raises ValueError for a loss scale that is infinite in Keras' float32 variable."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = float(optimizer.initial_scale)
        if not scale <= tf.float32.max:
            raise ValueError(
                f"LossScaleOptimizer(initial_scale={scale:g}): Keras keeps the scale in float32, "
                "where it is infinite and no gradient is finite: nothing would be trained. Use at "
                "most 2.0**127; the default is 2.0**15."
            )
