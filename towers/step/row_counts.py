"""Checks that inputs, labels and weights of a batch have one row for each example.

If Python knows the numbers of rows and they differ, a ValueError is raised. If only the graph knows
them (batches of a tf.data iterator), the graph compares them before the step.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.machine.devices import HOST
from towers.step.sharding import Placed, shard_sizes

_PARTS = ("x", "y", "sample_weight")
_BEGIN, _END = "the parts of a batch differ in their number of rows: ", " in every part."
_WAY_OUT = ". Give one row for each example" + _END
_GATHERED = (
    " needs one row for each example of a shard. Gather two views of a batch one by one, and "
    "concatenate them after that."
)
_SAID = re.compile(
    f"{re.escape(_BEGIN)}.*?{re.escape(_END)}|towers\\.gather, [^ ]*:{re.escape(_GATHERED)}",
    re.DOTALL,
)
_SCALAR = -1


def check_rows(*batch: Any) -> None:
    """Raises ValueError if parts of a batch are known to have different numbers of rows.

    Args:
        batch: x, y and sample_weight, structures of tensors or arrays; None for an absent part.
    """
    known = {_rows(part) for part in tf.nest.flatten(batch) if part is not None} - {None}
    if len(known) > 1 or _SCALAR in known:
        check_arrays(*batch)
        odd = {_SCALAR: "none (a scalar)", None: "?"}
        rows = {name: _rows(part) for name, part in _named_parts(batch)}
        listed = ", ".join(f"{name} {odd.get(n, n)}" for name, n in rows.items())
        raise ValueError(_BEGIN + listed + _WAY_OUT)


def check_arrays(*batch: Any) -> None:
    """Raises ValueError for lists of numbers: TensorFlow would make a tensor of each number.

    Args:
        batch: up to three structures, x, y and sample_weight.
    """
    for name, part in zip(_PARTS, batch):
        numbers = (isinstance(v, bool | int | float | np.generic) for v in tf.nest.flatten(part))
        if isinstance(part, list | tuple | dict) and any(numbers):
            raise ValueError(
                f"{name} is a {type(part).__name__} of numbers; a batch is an array or a tensor of "
                f"N rows, or a structure of these. Pass numpy.asarray({name})."
            )


@contextmanager
def checked_rows(*batch: Any) -> Iterator[None]:
    """Makes operations of the with block wait until the graph has compared the numbers of rows.

    Args:
        batch: x, y and sample_weight, structures of the graph's tensors; or None.

    Raises:
        ValueError: the numbers differ already in the trace. If they differ only when the graph
            runs, it fails with an InvalidArgumentError, which `readable` converts.
    """
    check_rows(*batch)
    named, assertions = _named_parts(batch), []
    said: list[Any] = []
    if len(named) > 1 and any(_rows(part) is None for _, part in named):
        with tf.device(HOST):
            counts = [tf.cast(tf.shape(part)[0], tf.int32) for _, part in named]
            for (name, _), count in zip(named, counts, strict=True):
                said += [f"{', ' if said else _BEGIN}{name} ", count]
            same = tf.reduce_all(tf.equal(tf.stack(counts), counts[0]))
            assertions = [tf.debugging.Assert(same, [*said, _WAY_OUT])]
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


def gathered_rows_text(line: str) -> str:
    """Returns the assertion text for rows to gather that differ in number from the shard's.

    Args:
        line: the user's line that calls `gather`, such as "file.py:12".
    """
    return f"towers.gather, {line}:{_GATHERED}"


def check_placed(placed: Placed, batch: Any, num_towers: int, local_towers: range) -> None:
    """Raises ValueError if the shards' numbers of rows do not fit the batch.

    Args:
        placed, local_towers: the shards and indices of this worker's towers; None: no shards yet.
        batch: a structure of tensors or arrays [N, ...], for `num_towers` towers.
    """
    if placed is None:
        return
    check_rows(batch)
    num_examples = next(_rows(part) for part in tf.nest.flatten(batch) if part is not None)
    sizes = shard_sizes(num_examples or 0, num_towers)
    for tower, shard in zip(local_towers, placed, strict=True):
        expected = max(sizes[tower], 1)
        found = {_rows(v) for v in tf.nest.flatten(shard) if v is not None}
        if found != {expected}:
            raise ValueError(
                f"placed: the shard of tower {tower} has {'/'.join(map(str, found))} rows; of "
                f"{num_examples} examples it has {expected}. Pass what towers.prefetched makes."
            )


def _rows(part: Any) -> int | None:
    """Returns the number of rows of a tensor or array; None if only the graph knows it."""
    try:
        return len(part)  # 10 times as fast as reading the shape of an array or an eager tensor
    except TypeError:
        shape = tf.TensorShape(getattr(part, "shape", ()))
        return _SCALAR if shape.rank == 0 else shape[0]


def _named_parts(batch: Sequence[Any]) -> list[tuple[str, Any]]:
    """Returns the present parts of a batch, with names: ("x", tensor), ("y['a']", tensor)."""
    return [
        (_PARTS[first] + "".join(f"[{key!r}]" for key in path), part)
        for (first, *path), part in keras.tree.flatten_with_path(batch)
        if part is not None
    ]
