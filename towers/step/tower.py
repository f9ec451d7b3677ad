"""One tower: (parameters, state, shard) -> TowerOutput, no side effects.

A tower is traced once, without a device. The step calls it once for each shard under `tf.device`,
and the operations follow the caller's device. Where towers meet (`synchronized`), it is cut there.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.machine.loss_internals import marks_of
from towers.machine.tensorflow_internals import KEEP_WHOLE
from towers.step import state as state_lib
from towers.step.assigned import NOTHING, Assigned, Averaged, TowerScope, what_becomes_of
from towers.step.averaging import Values
from towers.step.bias_gradients import keep_biases_apart
from towers.step.fixed_batch import check_open_batch
from towers.step.gathering import gathered_by, refuse
from towers.step.joined_outputs import as_tensors, without_rows
from towers.step.lookups import apart
from towers.step.losses import SHARES_SPEC, Losses, Shares
from towers.step.nonfinite import are_finite
from towers.step.outputs import trackers_kept_out
from towers.step.raw_variables import check_closed
from towers.step.recomputed import called_in
from towers.step.shard_facts import ShardFacts
from towers.step.sharding import BatchValues
from towers.step.structures import Structure, any_rows, map_tensors
from towers.step.synchronized import Sum, synchronized, warn_of_averages
from towers.step.traced_tower import TracedTower, trace_tower


class TowerInput(NamedTuple):
    """The inputs of one tower, without the shares of its losses.

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
    """The results of one tower.

    loss: scalar, the shard's part of the global batch's loss: the towers' losses add up to it.
    gradients: one for each trainable variable: a tensor, slices as of `lookups`, or None.
    assigned: what the forward pass leaves in variables.
    predictions: the flattened outputs of the model, each [n, ...].
    marks: the outputs' masks and logits, each [n, ...], see `marks_of`.
    whole: the outputs without a batch axis, by their index: tower 0's value, or each tower's part.
    finite: [1 + V] bool, see `nonfinite.are_finite`; None where nobody asks.
    """

    loss: tf.Tensor
    gradients: Values
    assigned: Assigned
    predictions: list[tf.Tensor]
    marks: list[dict[str, tf.Tensor]]
    whole: Assigned = NOTHING
    finite: tf.Tensor | None = None


# What a tower takes beside its inputs.
_OPTIONS = {
    "train": (SHARES_SPEC, tf.TensorSpec([], tf.float32)),
    "test": (SHARES_SPEC,),
    "predict": (SHARES_SPEC,),
    "weigh_masked": (tf.TensorSpec([], tf.int32),),
}


class Tower:
    """The computation that every tower repeats on its own shard.

    losses: of the model's outputs, known once a method has been traced. options: of `tf.function`.
    faults: warnings of what towers do not compute as one device would, of the latest trace.
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
        batch_norm: str | None = "average",
        is_alone: bool = False,
        checked: Sequence[str] = (),
        jit_compile: bool = False,
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
        """
        self._model = model
        self.trainable = list(model.trainable_variables)
        self.state = list(model.non_trainable_variables)
        self._num_listed = len(self.state)
        statistics = set(map(id, state_lib.statistics(model, synchronized_layers)))
        self._averaged = (
            Averaged(set(), statistics) if batch_norm == "tower0" else Averaged(statistics, set())
        )
        self._is_average_chosen = batch_norm is not None
        self._is_alone = is_alone
        self._synchronized_layers = synchronized_layers
        self._checked = checked
        self.options = {
            "jit_compile": jit_compile or None,
            "experimental_attributes": KEEP_WHOLE,
        }
        self._traced: dict[str, TracedTower] = {}
        self.faults: list[str] = []
        self.losses = Losses(
            loss, loss_weights, getattr(model, "output_names", None), is_alone=is_alone
        )

    def train(
        self,
        inputs: TowerInput,
        shares: Shares,
        loss_scale: tf.Tensor,
        sum_towers: Sum | None = None,
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
            facts = self._facts(inputs, shares)
            forward = self._forward(inputs, facts, shares, training=True, sum_towers=sum_towers)
            loss = forward.loss
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
        return _output(forward, gradients, finite)

    def test(self, inputs: TowerInput, shares: Shares) -> TowerOutput:
        """Forward pass and loss on one shard, in inference mode."""
        return _output(self._forward(inputs, self._facts(inputs, shares), shares, training=False))

    def predict(self, inputs: TowerInput, shares: Shares) -> TowerOutput:
        """Forward pass on one shard, in inference mode; the loss is 0."""
        return _output(self._forward(inputs, self._facts(inputs, shares), training=False))

    def weigh_masked(self, inputs: TowerInput, size: tf.Tensor) -> tf.Tensor:
        """`Losses.weigh` where masks take part in it, at the cost of a forward pass.

        Masks mostly follow from the inputs alone: then the graph optimizer prunes all the rest.
        """
        forward = self._forward(inputs, None, training=True)
        masks = self.losses.masks(inputs.y, forward.predictions)
        return self.losses.weigh(inputs.y, inputs.sample_weight, size, masks)

    def trace(self, name: str, batch: BatchValues) -> tuple[TracedTower, TracedTower | None]:
        """The traced method, and the traced `weigh_masked` where masks decide a loss's weight.

        Traced once for all towers and all shard sizes. Both know the same state: it grows where a
        trace meets a variable that Keras does not list.

        Args:
            name: "train", "test" or "predict".
            batch: x, y, sample_weight of the dtypes and the structure to come; or their specs.

        Raises:
            ValueError: the model uses a variable in a way that towers cannot follow, assigns what
                each tower has another value of, or gathers rows.
        """
        known = -1
        while known < len(self.state):
            known, weigh = len(self.state), None
            tower = self._trace_once(name, batch)
            output = tower.structured_outputs
            has_losses = name != "predict"
            masks = [marks.get("mask") for marks in output.marks]
            if has_losses and self.losses.have_masks(batch[1], output.predictions, masks):
                weigh = self._trace_once("weigh_masked", batch)
        return tower, weigh

    def _trace_once(self, name: str, batch: BatchValues) -> TracedTower:
        """The traced method, traced anew only for other specs, or once more state is known."""
        specs = map_tensors(_any_size, batch)
        known = len(self.state)
        key = f"{name} {known} {specs}"
        if key not in self._traced:
            values = [list(map(_same_size, vs)) for vs in (self.trainable, self.state)]
            arguments = [TowerInput(*values, *specs), *_OPTIONS[name]]
            with gathered_by(refuse):
                meets = name == "train" and bool(self._synchronized_layers)
                traced = self._trace_method(getattr(self, name), arguments, meets=meets)
            if known == len(self.state):
                check_closed(traced.function)
            self._traced[key] = traced
        return self._traced[key]

    def _trace_method(self, method: Any, arguments: Sequence[Any], *, meets: bool) -> TracedTower:
        return trace_tower(method, arguments, self.options, meets=meets)

    @property
    def has_unsaved_noise(self) -> bool:
        """Whether what was traced draws noise by tf.random, whose state nobody can save."""
        return any(traced.has_unsaved_noise for traced in self._traced.values())

    @property
    def seeds(self) -> list[int]:
        """The indices of the state's variables that are random seeds."""
        return [i for i, v in enumerate(self.state) if state_lib.is_seed(v)]

    @property
    def met(self) -> list[Any]:
        """The state's variables that Keras does not list."""
        return self.state[self._num_listed:]

    def _add_to_state(self, unknown: Mapping[int, Any]) -> None:
        known = set(map(id, self.state))
        self.state += [variable for key, variable in unknown.items() if key not in known]

    def _forward(
        self,
        inputs: TowerInput,
        facts: ShardFacts | None,
        shares: Shares | None = None,
        *,
        training: bool,
        sum_towers: Sum | None = None,
    ) -> "_Forward":
        """Calls the model at these values; with `shares`, computes the shard's part of the loss.

        Without `facts`, the values that it assigns are dropped.
        """
        values = [*inputs.parameters, *inputs.state]
        known = zip([*self.trainable, *self.state], values, strict=True)
        scope = TowerScope(known, len(self.trainable))
        loss = tf.zeros([])
        with called_in(scope, lambda: self._meeting(facts, sum_towers)):
            outputs = as_tensors(self._model(inputs.x, training=training))
            self.losses.bind(outputs)
            changed = scope.changed()
            if shares is not None and facts is not None:
                loss = self._loss(inputs, outputs, facts, shares, scope, training)
                if self.losses.model_loss is None:  # what that assigns, Keras' loop assigns again
                    changed = scope.changed()
        scope.check_none_made(trainable=True)
        self._add_to_state(scope.unknown)
        assigned = NOTHING
        if self._is_alone:
            assigned = NOTHING._replace(same={i: after for i, _, _, after in changed})
        elif facts:
            assigned = what_becomes_of(changed, scope, facts, self._averaged)
            if training and not self._is_average_chosen:
                warn_of_averages(v for _, v, _, _ in changed if id(v) in self._averaged.means)
        predictions = tf.nest.flatten(outputs)
        whole = NOTHING
        if facts:
            if not self._is_alone:
                check_open_batch(predictions, facts)
            whole = without_rows(predictions, facts, is_alone=self._is_alone)
            self.faults = facts.rows.warn()
        return _Forward(predictions, assigned, loss, whole)

    def _facts(self, inputs: TowerInput, shares: Shares) -> ShardFacts:
        """The facts on the tensors of a trace that begins."""
        shard = [inputs.x, inputs.y, inputs.sample_weight]
        seeds = [inputs.state[i] for i in self.seeds]
        return ShardFacts.of_trace(shard, [*shares, *seeds], shares.examples)

    def _meeting(self, facts: ShardFacts | None, sum_towers: Sum | None) -> Any:
        if facts is None or sum_towers is None:
            return nullcontext()
        return synchronized(self._synchronized_layers, facts.weight > 0, facts.declared(sum_towers))

    def _loss(
        self, inputs: TowerInput, outputs: Structure, facts: ShardFacts, shares: Shares,
        scope: TowerScope, training: bool,
    ) -> tf.Tensor:
        """The shard's part of the global batch's loss, which may read variables, too."""
        x, y, sample_weight = inputs[2:]
        compute_loss = self.losses.model_loss
        if compute_loss is None:
            added = [tf.reduce_sum(value) for value in self._model.losses]
        else:
            with trackers_kept_out(self._model, scope):
                added = [compute_loss.compute(x, y, outputs, sample_weight, training)]
        parts = [facts.added_loss(value) for value in added]
        predictions = tf.nest.flatten(outputs)
        return self.losses.total(y, predictions, sample_weight, parts, shares, facts)


class _Forward(NamedTuple):
    """A forward pass: the flattened outputs, what it assigns, the shard's part of the loss."""

    predictions: list[tf.Tensor]
    assigned: Assigned
    loss: tf.Tensor
    whole: Assigned


def _output(
    forward: _Forward, gradients: Sequence[Any] = (), finite: tf.Tensor | None = None
) -> TowerOutput:
    marks = [marks_of(y_pred) for y_pred in forward.predictions]
    return TowerOutput(
        forward.loss, list(gradients), forward.assigned, forward.predictions, marks,
        forward.whole, finite
    )


def _any_size(tensor: tf.Tensor) -> tf.TypeSpec:
    """The tensor's spec with a free first dimension: shards differ by one example."""
    return any_rows(tensor) if tensor.shape.rank else _same_size(tensor)


def _same_size(tensor: tf.Tensor) -> tf.TensorSpec:
    return tf.TensorSpec(tensor.shape, tensor.dtype)
