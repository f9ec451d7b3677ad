"""`deterministic`: only kernels that give the same bits twice; and which operation has none."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import keras
import tensorflow as tf

# How TensorFlow's kernels, XLA and Python functions say it; each in words of its own.
_REFUSAL = re.compile(
    r"determinism is (?:enabled|not yet supported)|deterministic (?:\w+ )?implementation"
    r"|is not deterministic|run-to-run determinism",
    re.IGNORECASE,
)
# The node of a graph: layers' names, then the operation's; a call of a tower says nothing.
_NODE = re.compile(r"\{\{node ((?!\S*PartitionedCall)\S+?)\}\}")
_OPERATION = re.compile(r"\[Op:(\w+)\]")  # outside a graph
_LAYER = re.compile(r"Exception encountered when calling (\w+)")  # Keras' words
_DECORATION = re.compile(  # of a reason: in TensorFlow's log, in a message, by Python
    r"^[IWEF]\d{4} .*?[A-Z_]{5,}: |\{\{.*?\}\}|\[Op:.*|\x1b\[\d*m|^\s*\w+Error: "
)


def enable(seed: int) -> None:
    """Turns TensorFlow's op determinism on, for good in this process.

    Args:
        seed: of TensorFlow, NumPy and Python, which must have one before the first random number.
    """
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()


@contextmanager
def refusals_explained(is_deterministic: bool, log: Path | None = None) -> Iterator[None]:
    """Turns an operation's refusal to be deterministic into a ValueError that names it.

    Args:
        is_deterministic: whether the run is.
        log: where TensorFlow's messages are. A refusal on one of several devices may arrive as the
            cancelled transfer to another, and stands there alone.
    """
    try:
        yield
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        told = error.__cause__ if isinstance(error.__cause__, tf.errors.OpError) else error
        text = str(told)
        if isinstance(error, tf.errors.CancelledError) and log is not None:
            text = _read(log)
        if not is_deterministic or not _REFUSAL.search(text):
            raise
        raise ValueError(explanation(text)) from error


def explanation(message: str) -> str:
    """One line: the operation with its layer, TensorFlow's reason, and the way out.

    Args:
        message: of TensorFlow, that holds a refusal.
    """
    lines = message.splitlines()
    index = next(i for i, line in enumerate(lines) if _REFUSAL.search(line))
    reason = _DECORATION.sub("", lines[index]).strip().rstrip(".")
    behind = "\n".join(lines[index:])
    node, operation = _find(_NODE, behind), _find(_OPERATION, behind)
    where = node or " in ".join(filter(None, [operation, _find(_LAYER, message)]))
    way_out = "Leave `deterministic` out, or replace that layer"
    if not where:
        where, way_out = "an operation", f"{way_out}, which num_gpus=1 may name"
    return f"`deterministic`: {where} refuses: {reason}. {way_out}."


def _find(pattern: re.Pattern, text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
