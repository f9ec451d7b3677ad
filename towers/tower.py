"""One tower: (parameters, state, shard) -> TowerOutput, no side effects.

A tower is traced once, without a device. The step calls it once for each shard under `tf.device`,
and the operations follow the caller's device.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers import losses as losses_lib
from towers.bias_gradients import keep_biases_apart
from towers.nonfinite import are_finite
from towers.scales import Scales
from towers.sharding import map_tensors
from towers.synchronized import TowerGroup


class TowerOutput(NamedTuple):
    """What one tower hands back.

    loss: scalar, the shard's part of the global batch's loss: the towers' losses add up to it.
    gradients: one for each trainable variable: a tensor, an IndexedSlices, or None.
    state: one for each non-trainable variable: its new value, None where nothing changed.
    predictions: the flattened outputs of the model, each [n, ...].
    masks: the outputs' Keras masks, each [n, ...] or None.
    finite: [1 + V] bool, see `nonfinite.are_finite`; None where nobody asks.
    """

    loss: tf.Tensor
    gradients: list[Any]
    state: list[tf.Tensor | None]
    predictions: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    finite: tf.Tensor | None = None


class Tower:
    """The computation that every tower repeats on its own shard.

    Attributes known once a method has been traced: `outputs`, the structure of the model's outputs,
    and `losses`, the loss of each of them.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Any,
        loss_weights: Any,
        *,
        group: TowerGroup | None = None,
        checked: Sequence[str] = (),
        jit_compile: bool = False,
        inline: bool = False,
    ) -> None:
        """
        Args:
            model: a built model.
            loss: as `keras.Model.compile` takes it, or a ModelLoss.
            loss_weights: as `compile` takes them.
            group: the towers that synchronize their BatchNormalization; None where none do.
            checked: what must be finite: "loss", "gradients".
            jit_compile: compile with XLA, once for each shard size.
            inline: let the graph optimizer work on all towers and their sum at once.
        """
        self._model = model
        self._group = group
        self._checked = checked
        self._options = {
            "jit_compile": jit_compile or None,
            "experimental_attributes": None if inline or group else {"_noinline": True},
        }
        self._loss_arguments = (loss, loss_weights)
        self._model_loss = loss if isinstance(loss, losses_lib.ModelLoss) else None
        self._traced: dict[str, Any] = {}
        self.outputs: Any = None
        self.losses: list[losses_lib.OutputLoss | None] = []

    def train(
        self, parameters: list, state: list, x: Any, y: Any, sample_weight: Any, scales: Scales
    ) -> TowerOutput:
        """Forward and backward pass on one shard.

        Args:
            parameters: the values of the trainable variables.
            state: the values of the non-trainable variables.
            x: inputs, y: labels, sample_weight: structures of tensors [n, ...] or None.
            scales: see `Scales`.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(parameters)
            with self._group.synchronize(scales.added > 0) if self._group else nullcontext():
                predictions, new_state, added = self._forward(
                    parameters, state, x, True, y, sample_weight
                )
            loss = self._loss(y, predictions, sample_weight, added, scales)
            scaled = loss * tf.cast(scales.loss_scale, loss.dtype)
        gradients = tape.gradient(scaled, parameters)
        keep_biases_apart(loss.graph)
        finite = None
        if self._checked:
            finite = are_finite(loss, gradients if "gradients" in self._checked else [])
        return TowerOutput(loss, gradients, new_state, predictions, _masks(predictions), finite)

    def test(
        self, parameters: list, state: list, x: Any, y: Any, sample_weight: Any, scales: Scales
    ) -> TowerOutput:
        """Forward pass and loss on one shard, in inference mode."""
        predictions, _, added = self._forward(parameters, state, x, False, y, sample_weight)
        loss = self._loss(y, predictions, sample_weight, added, scales)
        return TowerOutput(loss, [], [], predictions, _masks(predictions))

    def predict(
        self, parameters: list, state: list, x: Any, y: Any, sample_weight: Any, scales: Scales
    ) -> TowerOutput:
        """Forward pass on one shard, in inference mode; the loss is 0."""
        del y, sample_weight, scales
        predictions, _, _ = self._forward(parameters, state, x, False, compute_losses=False)
        return TowerOutput(tf.zeros([]), [], [], predictions, _masks(predictions))

    def masked_weights(
        self, parameters: list, state: list, x: Any, y: Any, sample_weight: Any, size: tf.Tensor
    ) -> tf.Tensor:
        """The shard's `weights` where masks take part in them, at the cost of a forward pass.

        Masks mostly follow from the inputs alone: then the graph optimizer prunes all the rest.
        """
        predictions, _, _ = self._forward(parameters, state, x, True, compute_losses=False)
        masks = [
            output and losses_lib.loss_mask(output.function, label, y_pred)
            for output, label, y_pred in zip(
                self.losses, self.per_output(y, "y"), predictions, strict=True
            )
        ]
        return self.weights(sample_weight, size, masks)

    def weights(
        self, sample_weight: Any, size: tf.Tensor, masks: Sequence[tf.Tensor | None] | None = None
    ) -> tf.Tensor:
        """[outputs] float64: w_i of each output's loss on a shard of `size` examples, 0 without."""
        sample_weights = self.per_output(sample_weight, "sample_weight", repeat=True)
        return tf.stack([
            losses_lib.shard_weight(output.function, weight, size, mask)
            if output else tf.zeros([], tf.float64)
            for output, weight, mask in zip(
                self.losses, sample_weights, masks or [None] * len(self.losses), strict=True
            )
        ])

    def has_masks(self, y: Any, output: TowerOutput) -> bool:
        """Whether a mask decides the weight of some loss.

        Args:
            y: a shard's labels.
            output: a traced tower's outputs; only their dtypes and shapes count.
        """
        for loss, label, y_pred, mask in zip(
            self.losses, self.per_output(y, "y"), output.predictions, output.masks, strict=True
        ):
            if loss is not None and label is not None:
                if mask is not None or losses_lib.makes_mask(loss.function, label, y_pred):
                    return True
        return False

    def trace(self, name: str, *args: Any) -> Any:
        """One of the methods above as a function traced once for all towers and all shard sizes.

        Marked `_noinline` unless asked otherwise: the graph optimizer then works on each tower
        apart. Towers that synchronize never are: their collective operations would wait for each
        other for ever.

        Args:
            name: the method.
            args: arguments of the structure and the dtypes that it will be called with.

        Raises:
            ValueError: the model reads a variable that is not one of its own.
        """
        specs = map_tensors(_any_size, args[2:])
        key = name + str(specs)
        if key not in self._traced:
            values = tf.nest.map_structure(_same_size, args[:2])
            function = tf.function(
                getattr(self, name), autograph=False, **self._options
            ).get_concrete_function(*values, *specs)
            _check_closed(function, self._model)
            self._traced[key] = function
        return self._traced[key]

    def per_output(self, value: Any, what: str, repeat: bool = False) -> list[Any]:
        """`value` laid out beside the flattened outputs; None for all beside a ModelLoss."""
        if self._model_loss:
            return [None] * len(self.losses)
        if what == "y" and not isinstance(value, dict):
            value = self._beside_losses(value)
        names = getattr(self._model, "output_names", None)
        return losses_lib.per_output(value, self.outputs, names, what, repeat=repeat)

    def _beside_losses(self, y: Any) -> Any:
        """Labels for the outputs with a loss alone, as Keras takes them too, are laid beside it."""
        labels = tf.nest.flatten(y)
        if len(labels) == len(self.losses) - self.losses.count(None):
            remaining = iter(labels)
            return [loss and next(remaining) for loss in self.losses]
        return y

    def _forward(
        self,
        parameters: list,
        state: list,
        x: Any,
        training: bool,
        y: Any = None,
        sample_weight: Any = None,
        *,
        compute_losses: bool = True,
    ) -> tuple:
        """(flattened outputs, changed state, batch-mean losses) of `model(x)` at these values."""
        model = self._model
        variables = [*model.trainable_variables, *model.non_trainable_variables]
        mapping = list(zip(variables, [*parameters, *state], strict=True))
        trackers = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
        if self._model_loss:
            mapping += trackers
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True) as scope:
            outputs = model(x, training=training)
            if not compute_losses:
                added = []
            elif self._model_loss:
                added = [self._model_loss.compute(x, y, outputs, sample_weight, training)]
                _check_trackers(trackers, scope)
            else:
                added = [tf.reduce_sum(value) for value in model.losses]
        after = [scope.get_current_value(v) for v in model.non_trainable_variables]
        changed = [None if a is b else a for a, b in zip(after, state, strict=True)]
        self._bind(outputs)
        return tf.nest.flatten(outputs), changed, added

    def _bind(self, outputs: Any) -> None:
        """The structure of a subclassed model's outputs is not known before its first trace."""
        if self.outputs is None:
            self.outputs = tf.nest.map_structure(lambda v: v.dtype, outputs)
            names = getattr(self._model, "output_names", None)
            self.losses = losses_lib.resolve_losses(*self._loss_arguments, self.outputs, names)

    def _loss(
        self, y: Any, predictions: list, sample_weight: Any, added: list, scales: Scales
    ) -> tf.Tensor:
        """sum over outputs of factor * scale * loss, plus the added losses."""
        labels = self.per_output(y, "y")
        weights = self.per_output(sample_weight, "sample_weight", repeat=True)
        terms = []
        for i, output in enumerate(self.losses):
            if output is not None:
                value = output.function(labels[i], predictions[i], weights[i])
                terms.append(value * tf.cast(scales.losses[i] * output.factor, value.dtype))
        terms += [value * tf.cast(scales.added, value.dtype) for value in added]
        if not terms:
            raise ValueError("there is no loss: give a loss, or a layer that adds one.")
        return tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])


def check_compilable(model: keras.Model) -> None:
    """Raises ValueError where a layer uses a GPU's own operations that XLA does not know."""
    for layer in model._flatten_layers():
        if not layer.supports_jit:
            raise ValueError(
                f"--jit_compile: XLA cannot compile layer {layer.name!r}, a "
                f"{type(layer).__name__}, on a GPU. Leave --jit_compile out."
            )


def _any_size(tensor: tf.Tensor) -> tf.TensorSpec:
    """The tensor's spec with a free first dimension: shards differ by one example."""
    return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)


def _same_size(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _masks(predictions: list) -> list:
    return [losses_lib.keras_mask(y_pred) for y_pred in predictions]


def _check_trackers(trackers: list[tuple], scope: keras.StatelessScope) -> None:
    """What a compute_loss tracks is not a tower's to keep: Keras' loop runs it on all predictions.

    Losses that layers add exist in the towers alone, and would be missing there.
    """
    if scope.losses and any(scope.get_current_value(v) is not zero for v, zero in trackers):
        raise ValueError(
            "compute_loss updates a metric, and layers add losses with add_loss: the metric would "
            "miss them. Update the metric in compute_metrics instead."
        )


def _check_closed(function: Any, model: keras.Model) -> None:
    """A variable that is neither a parameter nor state would be shared by all towers, unseen."""
    if function.variables:
        names = ", ".join(sorted({v.name for v in function.variables}))
        raise ValueError(
            f"model {model.name!r} uses variables that Keras does not track in it: {names}. Create "
            "weights with add_weight or keras.Variable, and give random operations "
            "seed=keras.random.SeedGenerator(...) of the layer's own."
        )
