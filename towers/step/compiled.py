"""A compiled model's loss and metrics, as towers compute them over global batches."""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine import loss_internals
from towers.step.metrics import BatchMetrics
from towers.step.outputs import ModelLoss
from towers.step.sharding import batch_size
from towers.step.state import variables_device
from towers.step.structures import one_row

COMPILED = "compiled"  # an argument of TowerStep that comes from the model's `compile`
_STEPS = ("train_step", "test_step")


class Recipe(NamedTuple):
    """The built optimizer, the loss with its weights, and the metrics of a step."""

    optimizer: keras.optimizers.Optimizer
    loss: Any
    loss_weights: Any
    metrics: BatchMetrics


def recipe_of(
    model: keras.Model, optimizer: Any, loss: Any, loss_weights: Any, metrics: Any, home: str
) -> Recipe:
    """The recipe of these arguments of `TowerStep`; `home`: where its variables are made.

    An optimizer or a loss that is `COMPILED` is the one that the model was compiled with. With that
    loss come its weights and the metrics, unless they are given.

    Raises:
        ValueError: the model is not compiled, or its class has a custom `train_step`.
    """
    given = {"optimizer": optimizer, "loss": loss}
    missing = [name for name, v in given.items() if isinstance(v, str) and v == COMPILED]
    if missing and not model.compiled:
        raise ValueError(
            f"TowerStep has no {' and no '.join(missing)}, and model {model.name!r} is not "
            "compiled. Pass them, such as TowerStep(model, 'adam', 'mse'), or call model.compile."
        )
    if missing:
        check_steps(model)
    if "loss" in missing:
        loss, weights = losses(model)
        loss_weights = weights if loss_weights is None else loss_weights
        metrics = CompiledMetrics(model) if metrics is None else metrics
    optimizer = keras.optimizers.get(model.optimizer if "optimizer" in missing else optimizer)
    if not optimizer.built:  # LossScaleOptimizer would make its own variables twice
        with tf.device(home):
            optimizer.build(model.trainable_variables)
    if not isinstance(metrics, BatchMetrics):
        metrics = BatchMetrics(metrics, getattr(model, "output_names", None), home)
    return Recipe(optimizer, loss, loss_weights, metrics)


def check_steps(model: keras.Model) -> None:
    """Raises ValueError for a model whose class has steps of its own: `make_parallel` runs them."""
    for name in _STEPS:
        if overrides(model, name):
            raise ValueError(
                f"model ({model.name!r}) has a custom {name}, which towers.train and TowerStep do "
                "not run. Use towers.make_parallel(model, gpus=...) and its fit."
            )


def losses(model: keras.Model) -> tuple[Any, Any]:
    """(loss, loss_weights), as `TowerStep` takes them; (None, None) where layers add all losses."""
    if overrides(model, "compute_loss"):
        return ModelLoss(functools.partial(own_loss, model)), None
    return loss_internals.compiled_loss(model)


def recompile(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Compiles a compiled model with another optimizer, and all else as it was."""
    loss, loss_weights = loss_internals.compiled_loss(model)
    metrics, weighted_metrics = loss_internals.given_metrics(model)
    keras.Model.compile(  # not the class's own, which may take other arguments
        model, optimizer, loss, loss_weights, metrics, weighted_metrics
    )


def track_losses(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> None:
    """Feeds what a model tracks while it computes the loss of a global batch.

    The loss itself is known. As in Keras' own steps, the parameters have not changed yet.
    """
    if overrides(model, "compute_loss"):
        own_loss(model, x, y, y_pred, sample_weight, training)
    elif tracks_outputs(model, y_pred):
        loss_internals.track_output_losses(model, y, y_pred, sample_weight)


def update_metrics(
    model: keras.Model, loss: tf.Tensor, x: Any, y: Any, y_pred: Any, sample_weight: Any
) -> dict[str, tf.Tensor]:
    """Updates metrics with a global batch, as Keras' own steps do after the update."""
    loss_internals.loss_tracker(model).update_state(loss, sample_weight=batch_size(x))
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def directions(model: keras.Model, names: list[str]) -> dict[str, str | None]:
    """Which values are better, as `metric_direction` has it, of the loss and each metric.

    Args:
        model: compiled; its metrics are built.
        names: `CompiledMetrics.names`.
    """
    metrics = {metric.name: metric for metric in model.metrics}
    compiled = loss_internals.compiled_metrics(model)
    if compiled is not None and compiled.built:
        metrics |= dict(zip(compiled.result(), compiled.metrics, strict=True))
    found = {name: _direction(metrics.get(name)) for name in names}
    return {
        name: "down" if direction is None and f"_{name}".endswith("_loss") else direction
        for name, direction in found.items()
    }


class CompiledMetrics(BatchMetrics):
    """The metrics that a model was compiled with, kept in the model: callbacks find them there.

    names: of what `update` returns, in order; known once `build` was called.
    """

    def __init__(self, model: keras.Model) -> None:
        """Args: a compiled model."""
        self._holder, self._device = model, variables_device(model)
        self.need_predictions, self._is_built = True, False
        self.names = ["loss"]

    def track_losses(
        self, x: Any, y: Any, predictions: Any, sample_weight: Any = None, training: bool = False
    ) -> None:
        """Feeds what the model tracks while it computes its loss; arguments as for BatchMetrics."""
        with tf.device(self._device):
            track_losses(self._holder, x, y, predictions, sample_weight, training)

    def update(
        self, loss: tf.Tensor, x: Any, y: Any, predictions: Any, sample_weight: Any = None
    ) -> dict[str, tf.Tensor]:
        """Adds one global batch; arguments and result as for BatchMetrics."""
        with tf.device(self._device):
            logs = update_metrics(self._holder, loss, x, y, predictions, sample_weight)
            return {**self._loss(), **logs}

    def result(self) -> dict[str, tf.Tensor]:
        """The metrics' values; what only a `compute_metrics` of the model's own knows is NaN."""
        with tf.device(self._device):
            logs = {**self._loss(), **self._holder.get_metrics_result()}
            return {name: logs.get(name, tf.constant(math.nan)) for name in self.names}

    def build(self, y: Any, predictions: Any, x: Any = None, sample_weight: Any = None) -> None:
        """Makes the metrics' variables.

        Raises:
            ValueError: a metric is not one number, or does not fit the labels.
        """
        if self._is_built:
            return
        model, row = self._holder, one_row((x, y, predictions, sample_weight))
        with tf.device(self._device):
            if tracks_outputs(model, predictions):
                loss_internals.track_output_losses(model, *row[1:])
            logs = {**self._loss(), **model.compute_metrics(*row[:3], sample_weight=row[3])}
            self.reset()
        for name, value in logs.items():
            if tf.convert_to_tensor(value).shape.rank != 0:
                raise ValueError(
                    f"metric {name!r} is of shape {value.shape}, but a column of results.csv holds "
                    "one number: give the metric an average, or leave it out."
                )
        self.names, self._is_built = list(logs), True
        self.need_predictions = (
            loss_internals.compiled_metrics(model) is not None
            or tracks_outputs(model, predictions)
            or overrides(model, "compute_loss")
            or overrides(model, "compute_metrics")
        )

    def reset(self) -> None:
        """Forgets all batches."""
        loss_internals.loss_tracker(self._holder).reset_state()
        self._holder.reset_metrics()

    @property
    def variables(self) -> list[keras.Variable]:
        """The running sums, each once."""
        loss = loss_internals.loss_tracker(self._holder).variables
        return list({id(v): v for v in [*loss, *self._holder.metrics_variables]}.values())

    def _loss(self) -> dict[str, tf.Tensor]:
        return {"loss": loss_internals.loss_tracker(self._holder).result()}


def tracks_outputs(model: keras.Model, y_pred: Any) -> bool:
    """Whether Keras shows the value of each loss beside the total."""
    loss, _ = loss_internals.compiled_loss(model)
    if loss is None or overrides(model, "compute_loss"):
        return False
    return len([each for each in keras.tree.flatten(loss) if each is not None]) > 1 or (
        not keras.tree.is_nested(loss) and len(tf.nest.flatten(y_pred)) > 1
    )


def _direction(metric: keras.metrics.Metric | None) -> str | None:
    return None if metric is None else loss_internals.metric_direction(metric)


def overrides(model: keras.Model, name: str) -> bool:
    """Whether the model's own class replaces one of Keras' methods."""
    method: Callable = getattr(model.__class__, name)
    return method is not getattr(keras.Model, name)


def own_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """The class's own `compute_loss`, which may be older than the argument `training`."""
    takes_training = "training" in inspect.signature(model.compute_loss).parameters
    options = {"training": training} if takes_training else {}
    return model.compute_loss(x, y, y_pred, sample_weight, **options)
