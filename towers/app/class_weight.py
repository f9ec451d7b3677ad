"""Reads the weights of the classes in the loss, as in Keras' fit(class_weight=...).

0:1,1:5      Class 1 has weight 5; classes without an entry have weight 1.
balanced     Class k has weight N / (classes * examples of k), so all classes count equally.
"""

import math
from collections.abc import Mapping
from operator import index

BALANCED = "balanced"
_LARGEST_CLASS = 1_000_000  # the weights become a table with an entry for each class


def as_text(value: str | Mapping[int, float] | None) -> str | None:
    """Returns "0:1,1:5" for {0: 1, 1: 5} or such a text, not rounded; keeps BALANCED and None."""
    if value is None or isinstance(value, str) and value == BALANCED:
        return value
    texts = [(label, weight, f"{weight:g}") for label, weight in weights_of(value).items()]
    return ",".join(f"{label}:{t if float(t) == w else repr(w)}" for label, w, t in texts)


def _pairs(value: str | Mapping[int, float]) -> list[tuple[int, float]]:
    if isinstance(value, str):
        parts = [part.split(":") for part in value.split(",")]
        return [(int(label), float(weight)) for label, weight in parts]
    return [(index(label), float(weight)) for label, weight in value.items()]


def weights_of(value: str | Mapping[int, float]) -> dict[int, float]:
    """Returns {0: 1.0, 1: 5.0} for "0:1,1:5" or for such a mapping."""
    try:
        pairs = _pairs(value)
        is_valid = len(dict(pairs)) == len(pairs) > 0 and all(
            0 <= label <= _LARGEST_CLASS and 0 <= weight < math.inf for label, weight in pairs
        )
    except (AttributeError, TypeError, ValueError, OverflowError):
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"class_weight ({str(value)[:100]!r}) must be {BALANCED}, or a weight of at least 0 "
            "for each of some classes, each named once, such as 0:1,1:5."
        )
    return dict(pairs)
