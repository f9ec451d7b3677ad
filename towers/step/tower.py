"""Computes one tower: (parameters, state, shard) -> TowerOutput, without side effects.

A tower is traced once, without a device. The step calls it once for each shard under `tf.device`,
and the operations run on that device. Synchronized BatchNormalization and stages cut it.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.graph.levels import Dependence
from towers.graph.rows import Rows
from towers.machine.loss_internals import marks_of
from towers.machine.tensorflow_internals import KEEP_WHOLE, replace_input
from towers.step import state as state_lib
from towers.step.assigned import Assigned, TowerScope, what_becomes_of, without_rows
from towers.step.averaging import Values
from towers.step.calls import TracedTower, trace_tower
from towers.step.checks import check_open_batch
from towers.step.errors import are_finite
from towers.step.gathering import Sum, gathered_by, refuse, synchronized, warn_of_averages
from towers.step.lookups import separate_lookups
from towers.step.loss_kinds import ShardFacts, check_is_number, trackers_kept_out
from towers.step.losses import Losses, SHARES_SPEC, Shares
from towers.step.raw_variables import check_closed
from towers.step.recomputed import called_in
from towers.step.sharding import BatchValues
from towers.step.stages import Stages
from towers.step.structures import Structure, any_rows, components, map_tensors
from towers.step.xla import FIXED_SHAPES


class TowerInput(NamedTuple):
    """Holds one tower's values of the V trainable variables and of its state, and its shard."""

    parameters: list[tf.Tensor]
    state: list[tf.Tensor]
    x: Structure  # of tensors [n, ...] or None, as the next two
    y: Structure
    sample_weight: Structure


class TowerOutput(NamedTuple):
    """Holds the results of one tower."""

    loss: tf.Tensor  # scalar, the shard's summand of the global batch's loss
    assigned: Assigned  # the values that the forward pass assigns to variables
    predictions: list[tf.Tensor]  # the flattened outputs, [n, ...] each unless in `without_rows`
    marks: list[dict[str, tf.Tensor]]  # `marks_of` each output
    without_rows: Assigned  # outputs without a batch axis, by their index in `predictions`
    gradients: Values  # V tensors, slices (see `lookups`) or None
    finite: tf.Tensor | None  # [1 + V] bool: are loss and gradients finite? None if unchecked


# The specs of a method's arguments after the TowerInput.
_OPTIONS = {
    "train": (SHARES_SPEC, tf.TensorSpec([], tf.float32)), "test": (SHARES_SPEC,),
    "predict": (SHARES_SPEC,), "weigh_masked": (tf.TensorSpec([], tf.int32),),
}


class Tower:
    """Traces the computation that every tower repeats on its shard.

    losses: computes the losses of the model's outputs; knows the outputs after the first trace.
    faults: the latest trace's warnings about results that differ from one device's.
    trainable, state: the V trainable variables and all others. Changing a layer's `trainable` later
        has no effect here. Tracing adds variables that Keras does not list to the first
        `num_listed` of the state, such as tf.Variables.
    traced: the traced methods.
    """

    def __init__(
        self, model: keras.Model, loss: Any, loss_weights: Any,
        synchronized_layers: Sequence[keras.layers.Layer], batch_norm: str | None, *,
        is_alone: bool, checked: Sequence[str], jit_compile: bool | str,
        stages: Stages | None,
    ) -> None:
        """
        synchronized_layers: BatchNormalization layers with one mean over all towers.
        is_alone: whether there is only one tower, whose values need no merging.
        checked: the results to check for NaN and infinity: "loss", "gradients".
        jit_compile: True, False or `xla.FIXED_SHAPES`.
        """
        self._model, self._stages = model, stages
        self.trainable = list(model.trainable_variables)
        self.state = list(model.non_trainable_variables)
        self.num_listed = len(self.state)
        self._statistics = set(map(id, state_lib.statistics(model, synchronized_layers)))
        self._batch_norm, self._is_alone = batch_norm, is_alone
        self._synchronized_layers, self._checked = synchronized_layers, checked
        self._jit_compile = jit_compile
        self.traced: dict[str, TracedTower] = {}
        self.faults: list[str] = []
        names = getattr(model, "output_names", None)
        self.losses = Losses(loss, loss_weights, names, is_alone=is_alone)

    def train(
        self, inputs: TowerInput, shares: Shares, loss_scale: tf.Tensor,
        sum_towers: Sum | None = None,
    ) -> TowerOutput:
        """Runs both passes on one shard; with `sum_towers`, some layers are synchronized."""
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(inputs.parameters)
            facts = self._facts(inputs, shares)
            output = self._forward(inputs, facts, shares, training=True, sum_towers=sum_towers)
            loss = output.loss
            scaled = loss * tf.cast(loss_scale, loss.dtype)
        gradients = tape.gradient(scaled, inputs.parameters)
        for gradient, parameter in zip(gradients, inputs.parameters, strict=True):
            if isinstance(gradient, tf.Tensor):  # a masked recurrent layer's has an unknown shape
                gradient.set_shape(parameter.shape)
        keep_biases_apart(loss.graph)
        finite = None
        if self._checked:
            finite = are_finite(loss, gradients if "gradients" in self._checked else [])
        if not self._is_alone:
            gradients = [separate_lookups(each, facts) for each in gradients]
        return output._replace(gradients=list(gradients), finite=finite)

    def test(self, inputs: TowerInput, shares: Shares) -> TowerOutput:
        """Runs the forward pass and computes the loss on one shard, in inference mode."""
        return self._forward(inputs, self._facts(inputs, shares), shares, training=False)

    def predict(self, inputs: TowerInput, shares: Shares) -> TowerOutput:
        """Runs the forward pass on one shard, in inference mode; the loss is 0."""
        return self._forward(inputs, self._facts(inputs, shares), training=False)

    def weigh_masked(self, inputs: TowerInput, size: tf.Tensor) -> tf.Tensor:
        """Returns w_t of each loss term, [K] float64, for losses with masks; needs a forward pass.

        If masks follow from the inputs alone, the graph optimizer prunes everything else.
        """
        predictions = self._forward(inputs, None, training=True).predictions
        return self.losses.weigh(inputs.y, inputs.sample_weight, size, predictions)

    def trace(self, name: str, batch: BatchValues) -> tuple[TracedTower, TracedTower | None]:
        """Returns the traced method, and the traced `weigh_masked` if masks decide a loss's weight.

        Each is traced once for all towers and all shard sizes. If a trace finds a variable that
        Keras does not list, the state grows, and both are traced again.

        name: "train", "test" or "predict". batch: x, y and sample_weight, or their specs.
        """
        specs = map_tensors(  # shard sizes differ by 1
            lambda v: any_rows(v) if v.shape.rank else tf.TensorSpec(v.shape, v.dtype), batch
        )
        shapes = [v.shape[1:] for v in tf.nest.flatten(specs) if v is not None]
        is_fixed = all(shape.is_fully_defined() for shape in shapes)
        compiles = is_fixed if self._jit_compile == FIXED_SHAPES else self._jit_compile
        options = {"jit_compile": compiles or None, "experimental_attributes": KEEP_WHOLE}
        found: dict[str, TracedTower] = {}
        waiting = [name]
        while waiting:
            method, known = waiting.pop(), len(self.state)
            key = f"{method} {known} {specs}"
            if key not in self.traced:
                variables = [*self.trainable, *self.state]
                values = [tf.TensorSpec(v.shape, v.dtype) for v in variables]
                first = len(self.trainable)
                inputs = TowerInput(values[:first], values[first:], *specs)
                with gathered_by(refuse):
                    traced = trace_tower(
                        getattr(self, method), [inputs, *_OPTIONS[method]], options,
                        meets=method == "train" and bool(self._synchronized_layers),
                        stages=self._stages, variables=variables,
                    )
                if known == len(self.state):
                    check_closed(traced.function)
                self.traced[key] = traced
            found[method] = self.traced[key]
            if known < len(self.state):
                waiting = [name]
            elif method == name != "predict":
                output = found[name].structured_outputs
                masks = [marks.get("mask") for marks in output.marks]
                if self.losses.have_masks(batch[1], output.predictions, masks):
                    waiting.append("weigh_masked")
        return found[name], found.get("weigh_masked")

    @property
    def seeds(self) -> list[int]:
        """Returns the indices of the random seeds in `state`."""
        return [i for i, v in enumerate(self.state) if state_lib.is_seed(v)]

    def _facts(self, inputs: TowerInput, shares: Shares) -> ShardFacts:
        """Returns the facts about a new trace; shard, shares and seeds differ between towers."""
        rows = tf.nest.flatten(inputs[2:])
        own = components([rows, *shares, *(inputs.state[i] for i in self.seeds)])
        return ShardFacts(Dependence(own), Rows.of_shard(rows), shares.examples)

    def _forward(
        self, inputs: TowerInput, facts: ShardFacts | None, shares: Shares | None = None, *,
        training: bool, sum_towers: Sum | None = None,
    ) -> TowerOutput:
        """Calls the model; computes the loss with `shares`, and what it assigns with `facts`."""
        values = [*inputs.parameters, *inputs.state]
        known = zip([*self.trainable, *self.state], values, strict=True)
        scope = TowerScope(known, len(self.trainable))

        def meeting() -> Any:
            if facts is None or sum_towers is None:
                return nullcontext()
            is_real, sums = facts.weight > 0, facts.declared(sum_towers)
            return synchronized(self._synchronized_layers, is_real, sums)

        loss = tf.zeros([])
        with called_in(scope, meeting):
            outputs = map_tensors(  # Keras takes Python numbers, too
                lambda v: v if tf.is_tensor(v) else keras.ops.convert_to_tensor(v),
                self._model(inputs.x, training=training),
            )
            self.losses.bind(outputs)
            changed = scope.changed()
            if shares is not None and facts is not None:
                loss = self._loss(inputs, outputs, facts, shares, scope, training)
                if self.losses.model_loss is None:  # else `compute_loss` assigns in a later call
                    changed = scope.changed()
        scope.check_none_made(trainable=True)
        listed = set(map(id, self.state))
        self.state += [v for key, v in scope.unknown.items() if key not in listed]
        predictions = tf.nest.flatten(outputs)
        assigned = whole = Assigned({}, {})
        if self._is_alone:
            assigned = Assigned({i: after for i, _, _, after in changed}, {})
        elif facts:
            takes_first = self._batch_norm == "tower0"
            assigned = what_becomes_of(changed, scope, facts, self._statistics, takes_first)
            if training and self._batch_norm is None:
                warn_of_averages(v for _, v, _, _ in changed if id(v) in self._statistics)
            check_open_batch(predictions, facts)
        if facts:
            whole = without_rows(predictions, facts, is_alone=self._is_alone)
            self.faults = facts.rows.warn()
        marks = [marks_of(y_pred) for y_pred in predictions]
        return TowerOutput(loss, assigned, predictions, marks, whole, [], None)

    def _loss(
        self, inputs: TowerInput, outputs: Structure, facts: ShardFacts, shares: Shares,
        scope: TowerScope, training: bool,
    ) -> tf.Tensor:
        """Returns the shard's part of the global batch's loss; losses may read variables."""
        x, y, sample_weight = inputs[2:]
        compute_loss = self.losses.model_loss
        if compute_loss is None:
            added = [tf.reduce_sum(value) for value in self._model.losses]
        else:
            with trackers_kept_out(self._model, scope):
                added = [compute_loss(x, y, outputs, sample_weight, training)]
            check_is_number(added[0])
        return self.losses.total(y, tf.nest.flatten(outputs), sample_weight, added, shares, facts)


def keep_biases_apart(graph: tf.Graph) -> None:
    """Makes every BiasAddGrad of a graph that is being traced read through a separate identity.

           gradient of the convolution's output
                  |                |
               identity            |        without it, TensorFlow joins the two below into one
                  |                |        oneDNN operation on CPUs, which takes longer than both
             BiasAddGrad   Conv2DBackpropFilter

    Gradients stay. A step of cnn is 1.09 to 1.18 times as fast; GPUs have no such operation.
    """
    for op in graph.get_operations():
        if op.type == "BiasAddGrad":
            replace_input(op, 0, tf.identity(op.inputs[0], f"{op.name}_apart"))
