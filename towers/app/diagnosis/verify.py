"""Compares the towers' averaged gradient with the large-batch gradient: one tower, whole batch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.workers.cluster import ALONE
from towers.machine.gpus import multiplies_in_tf32
from towers.machine.keras_internals import all_layers, noise_left_out
from towers.step import TowerStep
from towers.step.synchronized import synchronized_layers

# What float rounding may amount to, by what matmuls and convolutions multiply in: 2^-53, 2^-24 and
# 2^-11, 2^-11 or 2^-8 an operation (IEEE 754; TF32: NVIDIA's A100 whitepaper), over the sums of a
# whole batch. XLA adds in another order, and rounds no more. The coarsest stands last. A sum of
# many rows that is itself of 16 bits, such as a bias' gradient, has no such bound: see `_compared`.
_TOLERANCES = {"float64": 1e-10, "float32": 1e-3, "TF32": 2e-2, "float16": 2e-2, "bfloat16": 2e-1}

# A gradient that is zero but for rounding, such as that of a bias before BatchNormalization, says
# nothing: differences are measured against at least this part of the largest gradient of all.
_NEGLIGIBLE = 1e-2
_UNKNOWN = (
    "which loss or layer it is cannot be told. Look for what computes across the rows of a batch "
    "and use towers.gather(rows) there, with towers.make_parallel(model, gpus)"
)


class Verification(NamedTuple):
    """The result of the comparison.

    difference: max|a - b| / max|b| of the variable where it most exceeds its tolerance; b: the
        large batch's, in float32 where layers compute in 16 bits. Where b is nearly zero, see
        `_NEGLIGIBLE`.
    tolerance: what float rounding may amount to in that variable.
    variable: its path.
    draws_noise: whether the model draws noise by tf.random, which this check cannot leave out.
    batch_norm_layers: layers that normalize by the statistics of each tower's own shard.
    multiplied_in: the dtype that matmuls and convolutions round to, see `multiplied_in`.
    cause: the lines of the model to blame, as far as can be told, and the way out; empty where
        the difference is float rounding or by design.
    """

    difference: float
    tolerance: float
    variable: str
    draws_noise: bool
    batch_norm_layers: list[str]
    multiplied_in: str
    cause: str = ""

    @property
    def is_by_design(self) -> bool:
        """Whether towers differ from one device as they should."""
        return self.difference > self.tolerance and bool(self._reasons())

    @property
    def _rounding(self) -> str:
        """Such as "float rounding (2e-02)"; of another dtype than float32, with its name."""
        name = "" if self.multiplied_in == "float32" else f" of {self.multiplied_in}"
        return f"float rounding{name} ({self.tolerance:.0e})"

    @property
    def error(self) -> str | None:
        """The error with its ways out; None where nothing is wrong."""
        if not self.cause:
            return None
        return (
            "`verify_gradients` has found that the averaged gradient is not the large-batch "
            f"gradient: they differ by {self.difference:.1e} in {self.variable}, more than "
            f"{self._rounding} explains. What is to blame: {self.cause.rstrip('.')}; "
            "or num_towers=1, whose shard is the batch. verify_gradients=warn trains all the same."
        )

    def __str__(self) -> str:
        found = f"largest relative difference {self.difference:.1e} ({self.variable}): "
        if self.cause:
            cause = self.cause.rstrip(".")
            return f"{found}MORE than {self._rounding} explains: {cause}"
        if self.is_by_design:
            return f"{found}by design, {' and '.join(self._reasons())}"
        within = "" if self.multiplied_in == "float32" else f", within {self._rounding}"
        return f"{found}the averaged gradient is the large-batch gradient{within}"

    def _reasons(self) -> list[str]:
        reasons = []
        if self.draws_noise:
            reasons.append("each tower draws its own random numbers by tf.random")
        if self.batch_norm_layers:
            names = ", ".join(self.batch_norm_layers)
            reasons.append(f"each tower normalizes by its own shard in {names}")
        return reasons


def verify_gradients(
    step: TowerStep, loss: Any, x: Any, y: Any, sample_weight: Any = None, loss_weights: Any = None
) -> Verification:
    """Computes both gradients on one batch without Keras' noise; changes no variable and no seed.

    Args:
        step: the towers, made for this check alone: the graph that is traced here has no noise.
        loss, loss_weights: what `step` was made with.
        x: the global batch's inputs [N, ...], or a structure of these.
        y, sample_weight: its labels and weights, likewise.
    """
    def large_batch() -> list[tf.Tensor | None]:
        one_tower = TowerStep(
            step.model, "sgd", loss, loss_weights=loss_weights,
            devices=step.devices[:1], num_towers=1, policy=step.policy, cluster=ALONE,
            jit_compile=step.compiles,
        )
        return _dense(one_tower.gradients(x, y, sample_weight)[1])

    with noise_left_out():
        averaged, rounded = _dense(step.gradients(x, y, sample_weight)[1]), large_batch()
        with _in_float32(step.model) as changed:
            expected = large_batch() if changed else rounded
    coarsest = multiplied_in(step.model, step.devices)
    paths = [variable.path for variable in step.trainable_variables]
    difference, tolerance, variable = _compared(
        averaged, rounded, expected, paths, _TOLERANCES[coarsest]
    )
    several = step.num_towers > 1
    found = Verification(
        difference,
        tolerance,
        variable,
        several and step.has_unsaved_noise,
        _batch_norm_layers(step.model, step.batch_norm) if several else [],
        coarsest,
    )
    if difference <= tolerance:
        return found
    cause = " ".join(step.tower.faults) or ("" if found.is_by_design else _UNKNOWN)
    return found._replace(cause=cause)


def multiplied_in(model: keras.Model, devices: Sequence[str]) -> str:
    """The coarsest of the dtypes that a model's matmuls and convolutions multiply in.

    That of its layers and of its loss; float32 on a GPU is mostly TF32: "float64", "float32",
    "TF32", "float16" or "bfloat16".
    """
    innermost = [layer for layer in all_layers(model) if len(all_layers(layer)) == 1]
    used = {layer.compute_dtype for layer in innermost if layer.weights} | {keras.config.floatx()}
    if "float32" in used and multiplies_in_tf32(devices):
        used.add("TF32")
    return max(used & _TOLERANCES.keys(), key=list(_TOLERANCES).index, default="float32")


def _dense(gradients: Sequence[Any]) -> list[tf.Tensor | None]:
    return [None if each is None else tf.convert_to_tensor(each) for each in gradients]


@contextmanager
def _in_float32(model: keras.Model) -> Iterator[bool]:
    """Layers that compute in 16 bits on float32 parameters compute in float32; were there any?"""
    policies = [
        (layer, layer.dtype_policy)
        for layer in all_layers(model)
        if type(layer.dtype_policy) is keras.DTypePolicy
        and layer.variable_dtype == "float32" != layer.compute_dtype
    ]
    try:
        for layer, _ in policies:
            layer.dtype_policy = "float32"
        yield bool(policies)
    finally:
        for layer, policy in policies:
            layer.dtype_policy = policy


def _compared(
    averaged: Sequence[Any], rounded: Sequence[Any], expected: Sequence[Any],
    paths: Sequence[str], tolerance: float,
) -> tuple[float, float, str]:
    """(difference, tolerance, path) of the variable that most exceeds its tolerance.

    Args:
        averaged, rounded: the towers' gradients and one tower's, in the dtypes of the model.
        expected: one tower's in float32. What `rounded` loses, towers may lose, and as much again.
        paths: the variables'.
        tolerance: of a variable where that is less.
    """
    found = [(0.0, tolerance, "none")]
    least = _NEGLIGIBLE * max((_largest(b) for b in expected if b is not None), default=0.0)
    for a, r, b, path in zip(averaged, rounded, expected, paths, strict=True):
        if b is not None:
            lost = 2 * _relative_difference(r, b, least)
            allowed = max(tolerance, lost if math.isfinite(lost) else 0.0)
            found.append((_relative_difference(a, b, least), allowed, path))
    return max(found, key=lambda each: each[0] / each[1])


def _relative_difference(actual: tf.Tensor, expected: tf.Tensor, least: float) -> float:
    largest = max(_largest(expected), least)
    difference = _largest(actual - expected) / largest if largest else 0.0
    return math.inf if math.isnan(difference) else difference  # of any two, max() finds it


def _largest(tensor: tf.Tensor) -> float:
    return float(tf.reduce_max(tf.abs(tensor)))


def _batch_norm_layers(model: keras.Model, batch_norm: str) -> list[str]:
    """The layers that normalize by one tower's shard."""
    synchronized = {id(layer) for layer in synchronized_layers(model, batch_norm)}
    return [
        layer.name
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and id(layer) not in synchronized
    ]
