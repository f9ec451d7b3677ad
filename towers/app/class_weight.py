"""The weight of each class's examples in the loss, as in Keras' fit(class_weight=...).

    0:1,1:5      an example of class 1 counts five times; of a class that is not named, once
    balanced     N / (classes * examples of the class): each class counts as much as any other
"""

import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

BALANCED = "balanced"
_LARGEST_CLASS = 1_000_000  # weights are a table of so many
_SHOWN = 10  # weights in a line


def as_text(value: Any) -> str | None:
    """"0:1,1:5" of {0: 1, 1: 5}, or of such a text, with every digit; BALANCED and None stay.

    Raises:
        ValueError: it says something else.
    """
    if value is None or isinstance(value, str) and value == BALANCED:
        return value
    texts = {label: (f"{weight:g}", weight) for label, weight in weights_of(value).items()}
    return ",".join(
        f"{label}:{text if float(text) == weight else repr(weight)}"
        for label, (text, weight) in texts.items()
    )


def weights_of(value: Any) -> dict[int, float]:
    """{0: 1.0, 1: 5.0} of "0:1,1:5", or of such a mapping.

    Raises:
        ValueError: it says something else.
    """
    try:
        if isinstance(value, str):
            parts = [part.split(":") for part in value.split(",")]
            pairs = [(int(label), float(weight)) for label, weight in parts]
        else:
            pairs = [(index(label), float(weight)) for label, weight in value.items()]
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


def balanced(labels: Sequence[int]) -> dict[int, float]:
    """N / (classes * examples of the class), of each class that N labels name.

    Source: King and Zeng 2001, Logistic regression in rare events data; scikit-learn's "balanced".
    """
    import numpy as np  # not for flags alone, which the launcher reads, too

    classes, counts = np.unique(labels, return_counts=True)
    weights = len(labels) / (len(classes) * counts)
    return dict(zip(map(int, classes), map(float, weights), strict=True))


def note(weights: Mapping[int, float]) -> str:
    """A line for the user: "class weights: 0: 1, 1: 5"; of many classes the first ones."""
    pairs = [f"{label}: {weight:.4g}" for label, weight in sorted(weights.items())]
    shown = ", ".join(pairs[:_SHOWN])
    return f"class weights: {shown}{', ...' if len(pairs) > _SHOWN else ''}"
