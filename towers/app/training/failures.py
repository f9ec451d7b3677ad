"""Explains, in one line, a step that fails for lack of memory or because of `deterministic`."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import tensorflow as tf

from towers.app.config import TrainConfig
from towers.machine import files
from towers.machine.words import counted

# TensorFlow's kernels, XLA and Python functions word the refusal differently.
_REFUSAL = re.compile(
    r"determinism is (?:enabled|not yet supported)|deterministic (?:\w+ )?implementation"
    r"|is not deterministic|run-to-run determinism",
    re.IGNORECASE,
)
# A node of a graph: the names of layers, then of the operation. The call of a tower is skipped.
_NODE = re.compile(r"\{\{node ((?!\S*PartitionedCall)\S+?)\}\}")
_OPERATION = re.compile(r"\[Op:(\w+)\]")  # outside a graph
_DECORATION = re.compile(  # around a reason: a log's or a list's prefix, nodes, Python's error type
    r"^[IWEF]\d{4} .*?[A-Z_]{5,}: |^\s*\(\d+\) [A-Z_]{5,}: |\{\{.*?\}\}|\[Op:.*|\x1b\[\d*m"
    r"|^\s*\w+Error: "
)


@contextmanager
def failures_explained(config: TrainConfig, log: Path | None = None) -> Iterator[None]:
    """Turns a lack of memory, or an operation that is not deterministic, into a ValueError.

    `log` is the file with TensorFlow's messages, or None before the first step. If one of several
    devices fails, a transfer may be cancelled; then only the log names the failure.
    """
    try:
        yield
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, tf.errors.OpError) else error
        text = str(cause)
        if isinstance(error, tf.errors.CancelledError) and log is not None:
            text = ""
            with suppress(OSError):
                text = files.read_end(log, 2**24)
        if config.deterministic and _REFUSAL.search(text):
            raise ValueError(refusal(text)) from error
        if log is None or not is_exhausted(error, text):
            raise
        size, num_towers = config.batch_size or 0, config.fixed_towers or 1
        per_tower = math.ceil(size / num_towers)
        raise ValueError(
            f"a device has too little memory for {counted(per_tower, 'example')} a tower. Use a "
            f"smaller `batch_size` than {size:,}, or more towers than devices, which take turns: "
            f"num_towers={2 * num_towers}."
        ) from error


def is_exhausted(error: Exception, messages: str) -> bool:
    """Returns whether a device ran out of memory.

    messages: TensorFlow's log. If a transfer was cancelled, only the log names the cause.
    """
    if isinstance(error, tf.errors.CancelledError):
        return "RESOURCE_EXHAUSTED" in messages
    return isinstance(error, tf.errors.ResourceExhaustedError)


def refusal(message: str) -> str:
    """Returns the operation, the reason and the fix for a message of TensorFlow."""
    lines = message.splitlines()
    index = next(i for i, line in enumerate(lines) if _REFUSAL.search(line))
    reason = _DECORATION.sub("", lines[index]).strip().rstrip(".")
    behind = "\n".join(lines[index:])
    named = _NODE.search(behind) or _OPERATION.search(behind)
    return (
        f"`deterministic`: {named[1] if named else 'an operation'} refuses: {reason}. Leave "
        "`deterministic` out, or replace that layer."
    )
