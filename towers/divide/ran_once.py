"""Lists what runs once although it has rows of the batch, where a divided step loses speed.

    the towers' rows --> an operation across rows, or without a rule     once, on whole values
                         what reads the rows of its result               once, too

The result is exact all the same. Sums of the towers' parts, such as the loss and the gradients, are
left out, because every step has them.
"""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import tensorflow as tf
from rich import filesize

from towers.divide.facts import SIZE, Op, Value
from towers.divide.probes import ROWS, Dim, Probes, is_fixed
from towers.machine.user_lines import current_line, line_of, warn_user
from towers.machine.words import plural

_SLOW = re.compile("Conv|Dilation|MatMul|Einsum|While")  # types of operations that take time
_MOST_BYTES = 16_000_000  # of rows that a step may gather without a warning
_CHEAP = ("Assert", "Print", "PrintV2", "Shape", "Size")
_GRADIENT = "gradient_tape/"  # the name scope in which a tape puts the gradient of an operation
_PROBES = ROWS[:3]  # at which sizes are known
_OPEN = 30  # stands for a size that changes from batch to batch, such as the length of sequences


class RanOnce(NamedTuple):
    """Describes operations of one type and line that have rows of the batch and run once.

    line: the user's line that made them, such as "file.py:31", or the name scope of Keras' layer.
    cause: an operation before them that combined the rows, with its line; "" if there is none.
    num_bytes: the bytes of rows that they read in a step.
    share: an estimate of their share of the step, from 0 to 1: the bytes that they read and write,
        divided by the bytes that all operations read and write. A loop counts as one operation.
    """

    line: str
    operation: str
    times: int
    cause: str
    num_bytes: int
    share: float

    def __str__(self) -> str:
        """Returns "file.py:31: MatMul (2 times, 1.2 MB of rows, 40% of the step)", or the like."""
        times = f"{self.times:,} times, " if self.times > 1 else ""
        size = filesize.decimal(self.num_bytes)
        after = f", after {self.cause}" if self.cause else ""
        where = f"{times}{size} of rows, {self.share:.0%} of the step"
        return f"{self.line}: {self.operation} ({where}){after}"


class RunsOnce:
    """Holds the operations of a divided step that have rows and run once, for any batch size."""

    def __init__(self, ops: Sequence[Op], probes: Probes, entries: Collection[Value]) -> None:
        """`entries` are the components of the batch's ragged and sparse tensors."""
        self._line = current_line()  # the user's line that had the step traced
        self._causes = _causes(ops, probes, entries)
        self._named = _by_name(ops) if self._causes else {}
        self._moved = [value for op in ops for value in _moved(op)] if self._causes else []
        self._read = {op: _rows_read(op, self._causes, probes, entries) for op in self._causes}
        self._dims = {value: _dims(value, probes) for value in dict.fromkeys(self._moved)}

    def rows(self, batch_size: int) -> list[RanOnce]:
        """Returns a row for each line and type of operation, those with the largest share first.

        A size that changes from batch to batch without the batch size, such as the length of
        sequences, counts as about 30.
        """
        groups: dict[tuple[str, str], list[Op]] = {}
        for op in self._causes:
            groups.setdefault((self._line_of(op), op.type), []).append(op)
        bytes_of = {value: _bytes(value, dims, batch_size) for value, dims in self._dims.items()}
        total = sum(bytes_of[value] for value in self._moved)
        found = [self._row(*key, ops, bytes_of, total) for key, ops in groups.items()]
        return sorted(found, key=lambda row: row.share, reverse=True)

    def _row(
        self, line: str, kind: str, ops: Sequence[Op], bytes_of: Mapping[Value, float], total: float
    ) -> RanOnce:
        """Returns the row of the operations with one type in one line.

        bytes_of: the bytes of each value. total: the bytes that the step reads and writes.
        """
        first = self._causes[ops[0]]
        cause = "" if first in ops else f"{first.type} of {self._line_of(first)}"
        read = {value for op in ops for value in self._read[op]}
        moved = sum(bytes_of[value] for op in ops for value in _moved(op))
        share = moved / max(total, 1)
        num_bytes = round(sum(bytes_of[value] for value in read))
        return RanOnce(line, kind, len(ops), cause, num_bytes, share)

    def _line_of(self, op: Op) -> str:
        """Returns the user's line. If Keras called the layer, returns the layer's name scope."""
        source = op.source
        if source.name.startswith(_GRADIENT):  # the line of the tape says less
            parts = source.name.removeprefix(_GRADIENT).split("/")
            names = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
            source = next((self._named[name] for name in names if name in self._named), source)
        line, scope = line_of(source), source.name.rpartition("/")[0]
        if line == self._line and scope:
            return scope
        return line


def warn_of(rows: Sequence[RanOnce], name: str, where: str) -> bool:
    """Warns of what takes time in the model of this name; returns whether it did.

    A convolution, a product of matrices and a loop take time, and more than 16 MB of rows.

    where: the expression that returns the whole list, for the message.
    """
    slow = [row for row in rows if _SLOW.search(row.operation)]
    if not slow and sum(row.num_bytes for row in rows) > _MOST_BYTES:
        slow = list(rows)
    if not slow:
        return False
    more = len(rows) - 1
    others = f" {more} other {plural('line', more)} of operations do, too." if more else ""
    warn_user(
        f"model {name!r} computes this once for the whole batch, not in every tower: {slow[0]}."
        f"{others} The result is exact, but towers wait for it. If possible, compute each row from "
        f"one row there. {where} returns the whole list."
    )
    return True


def _by_name(ops: Iterable[Op]) -> dict[str, tf.Operation]:
    """Returns the traced operations by name, and one of each name scope by the scope."""
    found = {op.source.name: op.source for op in ops}
    for name, source in [*found.items()]:
        if not name.startswith(_GRADIENT):
            found.setdefault(name.rpartition("/")[0], source)
    return found


def _causes(ops: Iterable[Op], probes: Probes, entries: Collection[Value]) -> dict[Op, Op]:
    """Returns the operations that have rows and run once, each with the first one before it."""
    causes: dict[Op, Op] = {}
    for op in ops:
        if op.in_towers is None and op.type not in _CHEAP:
            read = _rows_read(op, causes, probes, entries)
            before = [value.op for value in read if value.op in causes]
            if read:
                causes[op] = causes[before[0]] if before else op
    return causes


def _moved(op: Op) -> list[Value]:
    """Returns what an operation reads and writes."""
    return [*op.inputs, *op.outputs]


def _rows_read(
    op: Op, causes: Mapping[Op, Op], probes: Probes, entries: Collection[Value]
) -> list[Value]:
    """Returns the inputs that are rows, or come from such rows and have rows, too."""

    def has_rows(value: Value) -> bool:
        dims = probes.dims(value)
        return dims is None or value.dtype == tf.variant or not all(map(is_fixed, dims))

    are_rows = (
        v.fact.has_rows or v in entries or v.op in causes and has_rows(v) for v in op.inputs
    )
    return list(itertools.compress(op.inputs, are_rows))


def _dims(value: Value, probes: Probes) -> list[Dim]:
    """Returns the size of each axis at the probes.

    If TensorFlow does not know how many rows there are, they count as the rows of the batch.
    """
    dims = probes.dims(value)
    if dims is None:
        sizes = value.shape.as_list() if value.shape.rank is not None else [0]
        open_size = [ROWS, *[(_OPEN,) * len(ROWS)] * len(sizes)]
        dims = [
            open_size[axis] if size is None else (size,) * len(ROWS)
            for axis, size in enumerate(sizes)
        ]
    return dims


def _bytes(value: Value, dims: Sequence[Dim], batch_size: int) -> float:
    """Returns the bytes of a value of these sizes; 0 for a list."""
    if value.fact == SIZE or value.dtype in (tf.resource, tf.variant):
        return 0.0
    return value.dtype.size * prod(_at(batch_size, dim) for dim in dims)


@lru_cache(4096)
def _at(batch_size: int, dim: Dim) -> float:
    """Returns what a size is at a batch size: a polynomial of degree 2."""
    found = 0.0
    for i, count in enumerate(_PROBES):
        others = [other for other in _PROBES if other != count]
        found += dim[i] * prod((batch_size - other) / (count - other) for other in others)
    return max(found, 0.0)
