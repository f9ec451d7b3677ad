"""Compares the towers' averaged gradient with the full-batch gradient of one device.

Both are computed without Keras' noise, and in float32 if layers compute in 16 bits.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import keras
import tensorflow as tf

from towers.divide.tower_step import TowerStep
from towers.machine.gpus import multiplies_in_tf32
from towers.machine.keras_internals import all_layers, noise_left_out
from towers.step.structures import Structure, as_tensor, map_tensors

# Rounding errors to expect, by the dtype that matmuls and convolutions multiply in, coarsest last.
# One operation rounds by 2^-53, 2^-24, 2^-11, 2^-11 or 2^-8 (IEEE 754; TF32: NVIDIA's A100
# whitepaper), and a batch sums many. XLA adds in another order, but does not round more.
_TOLERANCES = {"float64": 1e-10, "float32": 1e-3, "TF32": 2e-2, "float16": 2e-2, "bfloat16": 2e-1}

# A gradient that is zero except for rounding, such as a bias' gradient before BatchNormalization,
# says nothing. So differences are divided by at least this part of the largest gradient.
_NEGLIGIBLE = 1e-2
_UNKNOWN = (
    "a kernel or towers itself computes something else. Please report the model, and train with "
    "num_towers=1 until then"
)


class Verification(NamedTuple):
    """Holds the result of the comparison.

    difference: max|a - b| / max|b| of the variable where it is largest; a is the averaged
        gradient, b the full-batch gradient. If b is nearly zero, see `_NEGLIGIBLE`.
    """

    difference: float
    variable: str
    multiplied_in: str
    by_design: list[str]  # the reasons for which towers must differ from one device
    cause: str = ""  # the lines that cause the difference, with the fix; "": rounding or by design

    @property
    def error(self) -> str | None:
        """Returns the error with its fixes; None if nothing is wrong."""
        if not self.cause:
            return None
        return (
            "`verify_gradients` has found that the averaged gradient is not the full-batch "
            f"gradient: {self}. verify_gradients=warn trains all the same."
        )

    def __str__(self) -> str:
        found = f"largest relative difference {self.difference:.1e} ({self.variable})"
        name = "" if self.multiplied_in == "float32" else f" of {self.multiplied_in}"
        tolerance = _TOLERANCES[self.multiplied_in]
        rounding = f"float rounding{name} ({tolerance:.0e})"
        if self.cause:
            return f"{found}, MORE than {rounding} explains: {self.cause.rstrip('.')}"
        if self.difference > tolerance:
            return f"{found}: by design, {' and '.join(self.by_design)}"
        within = f", within {rounding}" if name else ""
        return f"{found}: the averaged gradient is the full-batch gradient{within}"


def verify_gradients(
    step: TowerStep, x: Structure, y: Structure, sample_weight: Structure = None
) -> Verification:
    """Compares both gradients on one batch without noise; changes no variable and no seed.

    The graph of `step` is traced without noise, so make it for this check alone.
    """
    model = step.model
    with noise_left_out(), in_float32(model):
        _, averaged = step.gradients(x, y, sample_weight)
        batch = map_tensors(as_tensor, (x, y, sample_weight))
        _, plain = step.steps.divided["gradients"].run_undivided(batch)
        coarsest = multiplied_in(model, step.devices)
    averaged = [g if g is None else tf.convert_to_tensor(g) for g in averaged]
    expected = [
        tf.convert_to_tensor(tf.IndexedSlices(*g, v.shape)) if isinstance(g, tuple) else g
        for g, v in zip(plain, step.trainable_variables, strict=True)
    ]
    by_design = []
    if step.num_towers > 1:
        if step.has_unsaved_noise:
            by_design.append("tf.random draws other numbers for each computation")
        names = (
            [
                layer.name
                for layer in all_layers(model)
                if isinstance(layer, keras.layers.BatchNormalization) and not layer.synchronized
            ]
            if step.batch_norm != "synchronized"
            else []
        )
        if names:
            by_design.append(f"each tower normalizes by its own shard in {', '.join(names)}")
    difference, path = _compared(averaged, expected, [v.path for v in step.trainable_variables])
    found = Verification(difference, path, coarsest, by_design)
    if difference <= _TOLERANCES[coarsest]:
        return found
    return found._replace(cause="" if by_design else _UNKNOWN)


def multiplied_in(model: keras.Model, devices: Sequence[str]) -> str:
    """Returns the coarsest of `_TOLERANCES` that layers with weights, or the loss, multiply in."""
    innermost = [layer for layer in all_layers(model) if len(all_layers(layer)) == 1]
    used = {layer.compute_dtype for layer in innermost if layer.weights} | {keras.config.floatx()}
    if "float32" in used and multiplies_in_tf32(devices):
        used.add("TF32")
    return max(used & _TOLERANCES.keys(), key=list(_TOLERANCES).index, default="float32")


@contextmanager
def in_float32(model: keras.Model) -> Iterator[None]:
    """Inside the context, layers with float32 parameters and 16-bit computation use float32."""
    policies = [
        (layer, layer.dtype_policy)
        for layer in all_layers(model)
        if type(layer.dtype_policy) is keras.DTypePolicy
        and layer.variable_dtype == "float32" != layer.compute_dtype
    ]
    try:
        for layer, _ in policies:
            layer.dtype_policy = "float32"
        yield
    finally:
        for layer, policy in policies:
            layer.dtype_policy = policy


def _compared(averaged: list, expected: list, paths: list[str]) -> tuple[float, str]:
    """Returns (difference, path) of the variable that differs most; a NaN counts as infinity."""
    largest = [0.0 if b is None else float(tf.reduce_max(tf.abs(b))) for b in expected]
    least = _NEGLIGIBLE * max(largest, default=0.0)
    found = [(0.0, "none")]
    for a, b, of_b, path in zip(averaged, expected, largest, paths, strict=True):
        if b is not None and max(of_b, least):
            difference = float(tf.reduce_max(tf.abs(a - b))) / max(of_b, least)
            found.append((math.inf if math.isnan(difference) else difference, path))
    return max(found)
