"""Compares the towers' averaged gradient with the large-batch gradient: one tower, whole batch."""

import math
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.diagnosis.blame import blamed_layer, blamed_loss, suspected
from towers.machine.cluster import ALONE
from towers.machine.keras_internals import all_layers
from towers.step import TowerStep
from towers.step.synchronized import synchronized_layers
from towers.step.trials import unknown_parts

# Float rounding: 2^-24 and 2^-8 or 2^-11 an operation, over the sums of a whole batch.
_TOLERANCES = {"float32": 1e-3, "mixed_float16": 2e-2, "mixed_bfloat16": 2e-1}

# A gradient that is zero but for rounding, such as that of a bias before BatchNormalization, says
# nothing: differences are measured against at least this part of the largest gradient of all.
_NEGLIGIBLE = 1e-2


class Verification(NamedTuple):
    """The result of the comparison.

    difference: max|a - b| / max|b| of the variable where it is largest; b: the large batch's.
        Where b is nearly zero, see `_NEGLIGIBLE`.
    variable: its path.
    random_layers: layers that draw other random numbers in each tower, such as Dropout.
    batch_norm_layers: layers that normalize by the statistics of each tower's own shard.
    tolerance: what float rounding may amount to.
    cause: the loss or layer to blame, as far as can be told, and the way out; empty where the
        difference is float rounding or by design.
    """

    difference: float
    variable: str
    random_layers: list[str]
    batch_norm_layers: list[str]
    tolerance: float
    cause: str = ""

    @property
    def error(self) -> str | None:
        """The error with its ways out; None where nothing is wrong."""
        if not self.cause:
            return None
        return (
            "`verify_gradients` has found that the averaged gradient is not the large-batch "
            f"gradient: they differ by {self.difference:.1e} in {self.variable}, and float "
            f"rounding explains {self.tolerance:.0e}. What is to blame: {self.cause.rstrip('.')}; "
            "or num_towers=1, whose shard is the batch. verify_gradients=warn trains all the same."
        )

    def __str__(self) -> str:
        found = f"largest relative difference {self.difference:.1e} ({self.variable}): "
        if self.cause:
            cause = self.cause.rstrip(".")
            return f"{found}MORE than float rounding ({self.tolerance:.0e}) explains: {cause}"
        if self.random_layers or self.batch_norm_layers:
            return f"{found}by design, {' and '.join(self._reasons())}"
        return f"{found}the averaged gradient is the large-batch gradient"

    def _reasons(self) -> list[str]:
        reasons = []
        if self.random_layers:
            names = ", ".join(self.random_layers)
            reasons.append(f"each tower draws its own random numbers in {names}")
        if self.batch_norm_layers:
            names = ", ".join(self.batch_norm_layers)
            reasons.append(f"each tower normalizes by its own shard in {names}")
        return reasons


def verify_gradients(
    step: TowerStep, loss: Any, x: Any, y: Any, sample_weight: Any = None, loss_weights: Any = None
) -> Verification:
    """Computes both gradients on one batch; changes no variable, no state, no seed.

    Args:
        step: the towers.
        loss, loss_weights: what `step` was made with.
        x: the global batch's inputs [N, ...], or a structure of these.
        y, sample_weight: its labels and weights, likewise.
    """
    one_tower = TowerStep(
        step.model, "sgd", loss, loss_weights=loss_weights,
        devices=step.devices[:1], num_towers=1, policy=step.policy, cluster=ALONE,
    )
    _, averaged = step.gradients(x, y, sample_weight)
    _, expected = one_tower.gradients(x, y, sample_weight)
    pairs = [
        (tf.convert_to_tensor(a), tf.convert_to_tensor(b), v.path)
        for a, b, v in zip(averaged, expected, step.trainable_variables, strict=True)
        if b is not None
    ]
    least = _NEGLIGIBLE * max((_largest(b) for _, b, _ in pairs), default=0.0)
    difference, variable = max(
        ((_relative_difference(a, b, least), path) for a, b, path in pairs), default=(0.0, "none")
    )
    several, tolerance = step.num_towers > 1, _TOLERANCES[keras.config.dtype_policy().name]
    found = Verification(
        difference,
        variable,
        _random_layers(step.model) if several else [],
        _batch_norm_layers(step.model, step.batch_norm) if several else [],
        tolerance,
    )
    if difference <= tolerance:
        return found
    by_design = bool(found.random_layers or found.batch_norm_layers)
    cause = blamed_loss(step.model, loss, loss_weights, x, y) if several else None
    if cause is None and (unknown_parts(step.model) or not by_design):
        cause = blamed_layer(step.model, x)
    if cause is None and not by_design:
        cause = suspected(step.model, loss, x)
    return found._replace(cause=cause or "")


def _relative_difference(actual: tf.Tensor, expected: tf.Tensor, least: float) -> float:
    largest = max(_largest(expected), least)
    difference = _largest(actual - expected) / largest if largest else 0.0
    return math.inf if math.isnan(difference) else difference  # of any two, max() finds it


def _largest(tensor: tf.Tensor) -> float:
    return float(tf.reduce_max(tf.abs(tensor)))


def _random_layers(model: keras.Model) -> list[str]:
    """The layers that draw random numbers; recurrent cells hold a generator without need."""
    names = []
    for layer in all_layers(model):
        rates = [getattr(layer, name, None) for name in ("rate", "dropout", "recurrent_dropout")]
        known = [rate for rate in rates if rate is not None]
        if _draws_itself(layer) and (any(known) or not known):
            names.append(layer.name)
    return names


def _draws_itself(layer: keras.layers.Layer) -> bool:
    """Whether a layer holds a seed that none of the layers inside of it holds."""
    _, *inner = all_layers(layer)
    return bool(_seed_states(layer) - {state for each in inner for state in _seed_states(each)})


def _batch_norm_layers(model: keras.Model, batch_norm: str) -> list[str]:
    """The layers that normalize by one tower's shard."""
    synchronized = {id(layer) for layer in synchronized_layers(model, batch_norm)}
    return [
        layer.name
        for layer in all_layers(model)
        if isinstance(layer, keras.layers.BatchNormalization) and id(layer) not in synchronized
    ]


def _seed_states(layer: keras.layers.Layer) -> set[int]:
    """The ids of the variables that are states of a `keras.random.SeedGenerator`.

    Those in a model or layer and in all layers inside of it: what sets its `variables` apart from
    its `weights`.
    """
    return set(map(id, layer.variables)) - set(map(id, layer.weights))
