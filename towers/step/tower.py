"""One tower: (parameters, state, shard) -> TowerOutput, no side effects.

A tower is traced once, without a device. The step calls it once for each shard under `tf.device`,
and the operations follow the caller's device. Where towers meet (`synchronized`), it is cut there.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.levels.dependence import Dependence
from towers.rows.rows import Rows
from towers.machine.keras_internals import all_layers, keras_mask, set_keras_mask
from towers.machine.tensorflow_internals import KEEP_WHOLE
from towers.step import state as state_lib
from towers.step.assigned import (
    NOTHING,
    Assigned,
    Averaged,
    ShardFacts,
    TowerScope,
    what_becomes_of,
)
from towers.step.averaging import Values
from towers.step.bias_gradients import keep_biases_apart
from towers.step.gathering import gathered_by, refuse
from towers.step.lookups import apart
from towers.step.nonfinite import are_finite
from towers.step.output_losses import OutputLosses
from towers.step.raw_variables import check_closed, raw_variables_in
from towers.step.sharding import Structure, any_rows, map_tensors
from towers.step.shares import Shares
from towers.step.synchronized import Sum, synchronized
from towers.step.traced_tower import TracedTower, trace_tower


class TowerInput(NamedTuple):
    """What one tower is fed, but for what its losses count.

    parameters: the values of the V trainable variables.
    state: the values of the tower's other variables.
    x: inputs, y: labels, sample_weight: structures of tensors [n, ...] or None.
    """

    parameters: list[tf.Tensor]
    state: list[tf.Tensor]
    x: Structure
    y: Structure
    sample_weight: Structure


class TowerOutput(NamedTuple):
    """What one tower hands back.

    loss: scalar, the shard's part of the global batch's loss: the towers' losses add up to it.
    gradients: one for each trainable variable: a tensor, slices as of `lookups`, or None.
    assigned: what the forward pass leaves in variables.
    predictions: the flattened outputs of the model, each [n, ...].
    masks: the outputs' Keras masks, each [n, ...] or None.
    finite: [1 + V] bool, see `nonfinite.are_finite`; None where nobody asks.
    """

    loss: tf.Tensor
    gradients: Values
    assigned: Assigned
    predictions: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    finite: tf.Tensor | None = None


LOSS_SCALE_SPEC = tf.TensorSpec([], tf.float32)


class Tower:
    """The computation that every tower repeats on its own shard.

    losses: of the model's outputs, known once a method has been traced.
    trainable, state: the V trainable variables and the others, as they were when this was made:
        what a layer's `trainable` is set to later changes neither. What a trace meets beside them,
        such as a tf.Variable that a layer keeps, joins the state.
    """

    def __init__(
        self,
        model: keras.Model,
        loss: Any,
        loss_weights: Any,
        *,
        synchronized_layers: Sequence[keras.layers.Layer] = (),
        batch_norm: str = "average",
        is_alone: bool = False,
        checked: Sequence[str] = (),
        jit_compile: bool = False,
        inline: bool = False,
    ) -> None:
        """
        Args:
            model: a built model.
            loss: as `keras.Model.compile` takes it, or a ModelLoss.
            loss_weights: as `compile` takes them.
            synchronized_layers: BatchNormalization layers in which the towers meet.
            batch_norm: what becomes of the others' statistics, see `TowerStep`.
            is_alone: whether there is one tower: then all that it assigns is the global batch's.
            checked: what must be finite: "loss", "gradients".
            jit_compile: compile with XLA, once for each shard size.
            inline: let the graph optimizer work on all towers and their sum at once.
        """
        self._model = model
        self.trainable = list(model.trainable_variables)
        self.state = list(model.non_trainable_variables)
        self._num_listed = len(self.state)
        statistics = set(map(id, state_lib.statistics(model, synchronized_layers)))
        self._averaged = (
            Averaged(set(), statistics) if batch_norm == "tower0" else Averaged(statistics, set())
        )
        self._is_alone = is_alone
        self._synchronized_layers = synchronized_layers
        self._checked = checked
        self._options = {
            "jit_compile": jit_compile or None,
            "experimental_attributes": None if inline else KEEP_WHOLE,
        }
        self._traced: dict[str, TracedTower] = {}
        self.losses = OutputLosses(loss, loss_weights, getattr(model, "output_names", None))

    def train(self, inputs: TowerInput, shares: Shares, loss_scale: tf.Tensor) -> TowerOutput:
        """Forward and backward pass on one shard, by itself; arguments as below."""
        return self.train_together(inputs, shares, loss_scale, None)

    def train_together(
        self,
        inputs: TowerInput,
        shares: Shares,
        loss_scale: tf.Tensor,
        sum_towers: Sum | None,
    ) -> TowerOutput:
        """Forward and backward pass on one shard.

        Args:
            inputs: of the tower.
            shares: what the shard's losses count in the global batch's.
            loss_scale: scalar float32, what `LossScaleOptimizer` wants in front of the gradients,
                else 1.
            sum_towers: what makes the towers meet in the synchronized layers; None: they do not.
        """
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(inputs.parameters)
            is_real = shares.examples > 0
            facts = self._facts(inputs, shares)
            layers, met = self._synchronized_layers, _declared(sum_towers, facts)
            with synchronized(layers, is_real, met) if met else nullcontext():
                predictions, assigned, added = self._forward(inputs, facts, training=True)
            added = self._weighed(added, facts)
            loss = self.losses.total(inputs.y, predictions, inputs.sample_weight, added, shares)
            scaled = loss * tf.cast(loss_scale, loss.dtype)
        gradients = tape.gradient(scaled, inputs.parameters)
        for gradient, parameter in zip(gradients, inputs.parameters, strict=True):
            if isinstance(gradient, tf.Tensor):  # that of a masked recurrent layer has no shape
                gradient.set_shape(parameter.shape)
        keep_biases_apart(loss.graph)
        finite = None
        if self._checked:
            finite = are_finite(loss, gradients if "gradients" in self._checked else [])
        gradients = gradients if self._is_alone else apart(gradients, facts.are_shared)
        return TowerOutput(loss, gradients, assigned, predictions, _masks(predictions), finite)

    def test(self, inputs: TowerInput, shares: Shares) -> TowerOutput:
        """Forward pass and loss on one shard, in inference mode."""
        facts = self._facts(inputs, shares)
        predictions, assigned, added = self._forward(inputs, facts, training=False)
        added = self._weighed(added, facts)
        loss = self.losses.total(inputs.y, predictions, inputs.sample_weight, added, shares)
        return TowerOutput(loss, [], assigned, predictions, _masks(predictions))

    def predict(self, inputs: TowerInput, shares: Shares) -> TowerOutput:
        """Forward pass on one shard, in inference mode; the loss is 0."""
        facts = self._facts(inputs, shares)
        predictions, assigned, _ = self._forward(
            inputs, facts, training=False, compute_losses=False
        )
        return TowerOutput(tf.zeros([]), [], assigned, predictions, _masks(predictions))

    def weigh_masked(self, inputs: TowerInput, size: tf.Tensor) -> tf.Tensor:
        """`OutputLosses.weigh` where masks take part in it, at the cost of a forward pass.

        Masks mostly follow from the inputs alone: then the graph optimizer prunes all the rest.
        """
        predictions, _, _ = self._forward(inputs, None, training=True, compute_losses=False)
        masks = self.losses.masks(inputs.y, predictions)
        return self.losses.weigh(inputs.sample_weight, size, masks)

    def trace(self, name: str, inputs: TowerInput, *options: Any) -> TracedTower:
        """One of the methods above as a function traced once for all towers and all shard sizes.

        Kept whole unless asked otherwise: the graph optimizer then works on each tower apart.

        Returns:
            It; of "train" with synchronized layers, cut where they meet.

        Args:
            name: the method.
            inputs, options: its arguments, of the structure and the dtypes to come; or their specs.

        Raises:
            ValueError: the model uses a variable in a way that towers cannot follow, assigns what
                each tower has another value of, or gathers rows.
        """
        specs = map_tensors(_any_size, (inputs[2:], options))
        known = -1
        while known < len(self.state):  # a trace may meet more
            known = len(self.state)
            key = f"{name} {known} {specs}"
            if key not in self._traced:
                values = [list(map(_same_size, vs)) for vs in (self.trainable, self.state)]
                arguments = [TowerInput(*values, *specs[0]), *specs[1]]
                with gathered_by(refuse):
                    meets = name == "train" and bool(self._synchronized_layers)
                    method = self.train_together if meets else getattr(self, name)
                    traced = trace_tower(method, arguments, self._options, meets=meets)
                if known == len(self.state):
                    check_closed(traced.function)
                self._traced[key] = traced
        return self._traced[key]

    @property
    def has_unsaved_noise(self) -> bool:
        """Whether what was traced draws noise by tf.random, whose state nobody can save."""
        return any(traced.has_unsaved_noise for traced in self._traced.values())

    @property
    def seeds(self) -> list[int]:
        """Which of the state are random seeds."""
        return [i for i, v in enumerate(self.state) if state_lib.is_seed(v)]

    @property
    def met(self) -> list[Any]:
        """The variables of the state that Keras does not list."""
        return self.state[self._num_listed:]

    def _meet(self, unknown: Mapping[int, Any]) -> None:
        known = set(map(id, self.state))
        self.state += [variable for key, variable in unknown.items() if key not in known]

    def _facts(self, inputs: TowerInput, shares: Shares) -> ShardFacts:
        """What is known of the trace's tensors, to begin with: which are a tower's own."""
        dependence = Dependence()
        shard = tf.nest.flatten([inputs.x, inputs.y, inputs.sample_weight])
        own = [*shard, *shares, *(inputs.state[i] for i in self.seeds)]
        for tensor in tf.nest.flatten(own, expand_composites=True):
            if tensor is not None:
                dependence.feed(tensor, local=True, level=0)
        return ShardFacts(dependence, Rows.of_shard(shard), shares.examples)

    def _forward(
        self,
        inputs: TowerInput,
        facts: ShardFacts | None,
        *,
        training: bool,
        compute_losses: bool = True,
    ) -> "_Forward":
        """What `model(x)` does at these values; without losses, where nobody asks for them.

        Without `facts`, what it assigns is forgotten.
        """
        model = self._model
        variables = [*self.trainable, *self.state]
        values = zip(variables, [*inputs.parameters, *inputs.state], strict=True)
        scope = TowerScope(values, len(self.trainable))
        with scope, raw_variables_in(scope):
            outputs = model(inputs.x, training=training)
            changed = scope.changed()  # what compute_loss assigns, Keras' loop lets it assign again
            if not compute_losses:
                added = []
            elif self.losses.model_loss:
                compute = self.losses.model_loss.compute
                trackers = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
                scope.state_mapping.update({id(v): zero for v, zero in trackers})
                added = [compute(inputs.x, inputs.y, outputs, inputs.sample_weight, training)]
                _check_trackers(trackers, scope)
            else:
                added = [tf.reduce_sum(value) for value in model.losses]
        self._meet(scope.unknown)
        assigned = NOTHING
        if self._is_alone:
            assigned = NOTHING._replace(same={i: after for i, _, _, after in changed})
        elif facts is not None:
            assigned = what_becomes_of(changed, scope, facts, self._averaged)
        self.losses.bind(outputs)
        return _Forward(tf.nest.flatten(outputs), assigned, added)

    def _weighed(self, added: Sequence[tf.Tensor], facts: ShardFacts) -> list[tf.Tensor]:
        """The shard's parts of the batch's losses that layers, or a `compute_loss`, have added.

        A sum over the rows counts by its rows; a mean over them, or a constant, weighs n_t / N.
        What is neither is warned of, and weighs that, too.
        """
        weighed = []
        for value in added:
            kind = facts.rows.check(value, "a loss that a layer, or compute_loss, adds")
            if kind.name == "sum":
                weighed.append(tf.where(facts.weight > 0, value, tf.zeros_like(value)))
            else:
                weighed.append(value * tf.cast(facts.weight, value.dtype))
        if not self._is_alone:
            facts.rows.warn()
        return weighed


class _Forward(NamedTuple):
    """A forward pass.

    predictions: the flattened outputs.
    assigned: what it leaves in variables.
    added: the losses of the shard that layers, or a `compute_loss`, have added.
    """

    predictions: list[tf.Tensor]
    assigned: Assigned
    added: list[tf.Tensor]


def _declared(sum_towers: Sum | None, facts: ShardFacts) -> Sum | None:
    """The same, and the facts know that all towers have the sums."""
    if sum_towers is None:
        return None

    def meet(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        sums = sum_towers(values)
        for tensor in sums:
            facts.dependence.feed(tensor, local=False, level=0)
        return sums

    return meet


def join_predictions(
    outputs: Sequence[TowerOutput], join: Callable[[list[tf.Tensor]], tf.Tensor]
) -> list[tf.Tensor]:
    """The model's flattened outputs for the global batch, rows in order, with their masks.

    Args:
        outputs: of the towers.
        join: of one tensor of each tower makes the global batch's rows.
    """
    joined = []
    for i, mask in enumerate(outputs[0].masks):
        y_pred = join([output.predictions[i] for output in outputs])
        if mask is not None:
            set_keras_mask(y_pred, join([output.masks[i] for output in outputs]))
        joined.append(y_pred)
    return joined


def check_compilable(model: keras.Model) -> None:
    """Raises ValueError where a layer uses operations that XLA does not know.

    Such as cuDNN's, which recurrent layers take on a machine with a GPU, and say so.
    """
    for layer in all_layers(model):
        if not layer.supports_jit:
            raise ValueError(
                f"jit_compile=True: XLA cannot compile layer {layer.name!r}, a "
                f"{type(layer).__name__}. Use jit_compile=False."
            )


def _any_size(tensor: tf.Tensor) -> tf.TypeSpec:
    """The tensor's spec with a free first dimension: shards differ by one example."""
    return any_rows(tensor) if tensor.shape.rank else _same_size(tensor)


def _same_size(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def _masks(predictions: Sequence[tf.Tensor]) -> list[tf.Tensor | None]:
    return [keras_mask(y_pred) for y_pred in predictions]


def _check_trackers(
    trackers: Sequence[tuple[keras.Variable, tf.Tensor]], scope: keras.StatelessScope
) -> None:
    """What a compute_loss tracks is not a tower's to keep: Keras' loop runs it on all predictions.

    Losses that layers add exist in the towers alone, and would be missing there.
    """
    if scope.losses and any(scope.get_current_value(v) is not zero for v, zero in trackers):
        raise ValueError(
            "compute_loss updates a metric, and layers add losses with add_loss: the metric would "
            "miss them. Update the metric in compute_metrics instead."
        )
