"""The state of a user's iterator as JSON values, and back: no pickle, which could run anything.

    {"at": 3, "order": array([2, 0, 1])}  ->  {"dict": [["at", 3], ["order", {"array": ...}]]}
"""

import base64
from typing import Any

import numpy as np


def encoded(value: Any) -> Any:
    """Numbers, text, bytes, lists, tuples, dicts, NumPy's and torch's arrays as JSON values.

    Raises:
        ValueError: it is, or holds, anything else.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, list):
        return [encoded(part) for part in value]
    if isinstance(value, tuple):
        return {"tuple": [encoded(part) for part in value]}
    if isinstance(value, dict):
        return {"dict": [[encoded(key), encoded(part)] for key, part in value.items()]}
    if type(value).__module__ == "torch" and hasattr(value, "numpy"):
        return {"torch": encoded(value.numpy())}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufcSU":
        array = np.asarray(value)
        return {"array": [array.dtype.str, list(array.shape), encoded(array.tobytes())]}
    raise ValueError(
        f"a {type(value).__name__} is none of numbers, text, bytes, arrays, lists, tuples and dicts"
    )


def decoded(value: Any) -> Any:
    """What `encoded` was given; a NumPy number comes back as an array of no dimensions."""
    if isinstance(value, list):
        return [decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "bytes":
        return base64.b64decode(held)
    if kind == "tuple":
        return tuple(decoded(part) for part in held)
    if kind == "dict":
        return {decoded(key): decoded(part) for key, part in held}
    if kind == "torch":
        import torch

        return torch.from_numpy(decoded(held))
    dtype, shape, data = held
    return np.frombuffer(decoded(data), np.dtype(dtype)).reshape(shape).copy()
