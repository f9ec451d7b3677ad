"""Replaces calls during a trace, so that an unchanged custom step combines the towers' values.

The calls are replaced in the whole process, but they differ only in the thread that traces.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf

from towers.custom_step.step_collectives import StepCollectives, Update, check_rank, has_rows
from towers.custom_step.variables import VariableScope
from towers.graph.facts import Fact
from towers.graph.rows import Rows
from towers.machine.keras_internals import optimized_variables
from towers.machine.replaced import ONE_AT_A_TIME, replaced
from towers.machine.loss_internals import compiled_metrics
from towers.machine.user_lines import current_line, warn_user
from towers.step.checks import check_loss_scale
from towers.step.gathering import GATHERER, gathered_by
from towers.step.lookups import join_lookups, separate_lookups
from towers.step.loss_kinds import loss_reduction, overrides_call
from towers.step.raw_variables import read_as_they_are

_VARIABLES = (keras.Variable, tf.Variable)


class Patches:
    """Implements the replaced calls of one trace, and provides `towers.gather` for it."""

    def __init__(self, collectives: StepCollectives, scope: VariableScope) -> None:
        self._collectives, self._scope = collectives, scope
        self._dependence, self._facts = collectives.dependence, collectives.facts
        self._rows = collectives.facts.rows

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Replaces the calls within the `with` block."""
        # Keras' subclasses with this method, such as a compiled model's loss, only call others.
        losses = [
            owner for owner in _owners(keras.losses.Loss, "__call__")
            if owner is keras.losses.Loss or not owner.__module__.startswith("keras.src.")
        ]
        replacements: list[tuple[type, str, Callable]] = [
            (tf.GradientTape, "gradient", self._gradient),
            (tf.GradientTape, "jacobian", self._jacobian),
            (tf.GradientTape, "batch_jacobian", self._jacobian),
            (keras.layers.Layer, "__call__", self._call_layer),
            *((owner, "__call__", self._call_loss) for owner in losses),
            (keras.Model, "compute_metrics", self._compute_metrics),
            (keras.metrics.Mean, "update_state", self._update_state),
            (keras.metrics.Sum, "update_state", self._update_state),
            *((o, "apply", self._apply) for o in _owners(keras.optimizers.Optimizer, "apply")),
        ]
        gather = self._collectives.gather_marked

        def in_this_trace(original: Callable, function: Callable) -> Callable:
            """Returns a call of function(original, ...), in the thread of this trace only."""

            def call(*args: Any, **options: Any) -> Any:
                if GATHERER.get() != gather:
                    return original(*args, **options)
                return function(original, *args, **options)

            return call

        with ONE_AT_A_TIME, gathered_by(gather), ExitStack() as stack:
            for owner, name, function in replacements:
                make = functools.partial(in_this_trace, function=function)
                stack.enter_context(replaced(owner, name, make))
            yield

    def _gradient(
        self, original: Callable, tape: tf.GradientTape, target: Any, sources: Any,
        output_gradients: Any = None, **options: Any,
    ) -> Any:
        """Sums gradients of weights over the towers, where a mean weighs n_i / N."""
        flat, targets = tf.nest.flatten(sources), tf.nest.flatten(target)
        if self._is_plain(flat, targets):
            return original(tape, target, sources, output_gradients, **options)
        if self._scope.is_unready:  # this trace only makes variables
            gradients = [tf.zeros_like(tf.convert_to_tensor(source)) for source in flat]
        else:
            shared = self._are_shared(flat)
            given = tf.nest.flatten(output_gradients) if output_gradients is not None else (
                [None] * len(targets))
            seeds = [self._seed(*pair, shared) for pair in zip(targets, given, strict=True)]
            gradients = original(tape, targets, flat, seeds, **options)
            if shared:
                gradients = self._sum(gradients, flat)
            else:  # rows, as `_seed` weighs them
                for gradient, fact in zip(gradients, map(self._rows.fact, flat), strict=True):
                    if tf.is_tensor(gradient) and fact.has_rows:
                        rows = Fact(axis=fact.axis, local=True, each=fact.each)
                        self._rows.declare(gradient, rows)
        is_nested = tf.nest.is_nested(sources)
        return tf.nest.pack_sequence_as(sources, gradients) if is_nested else gradients[0]

    def _is_local(self, tensor: tf.Tensor) -> bool:
        is_outermost = self._collectives.is_outermost()
        return self._dependence.local(tensor) if is_outermost else self._rows.fact(tensor).local

    def _is_plain(self, sources: Sequence[Any], targets: Sequence[tf.Tensor]) -> bool:
        """Returns whether this gradient needs no all-reduce.

        This holds if its targets depend on no shard, collective or update, or belong to one row in
        a loop over rows.
        """
        if any(isinstance(s, _VARIABLES) for s in sources):
            self._collectives.check_outermost("takes the gradient of weights")
        is_outermost, level = self._collectives.is_outermost(), self._dependence.level
        return not any(self._is_local(t) or is_outermost and level(t) for t in targets)

    def _are_shared(self, sources: Sequence[Any]) -> bool:
        """Returns whether the sources are equal in all towers: weights, or computed from them."""
        shared = [isinstance(v, _VARIABLES) or not self._is_local(v) for v in sources]
        if any(shared) and not all(shared):
            raise ValueError(
                f"{current_line()}: one gradient call with respect to weights, which towers share, "
                "and to rows of a shard. Make two calls, of a tape with persistent=True; leave out "
                "keras.remat and tf.recompute_grad, which make such calls themselves."
            )
        if all(shared):
            self._collectives.check_outermost("takes the gradient of values that towers share")
        return all(shared)

    def _seed(self, target: tf.Tensor, given: Any, shared: bool) -> tf.Tensor:
        """Returns a target's output gradient: `given` or 1, times n_i / N for a mean over rows.

        If the sources are not shared, they are rows, whose gradients stay in their tower.
        """
        seed = tf.ones_like(target) if given is None else tf.convert_to_tensor(given)
        check_rank(target, f"{current_line()}: the loss that a gradient is taken of")
        kind = self._rows.check(target * seed, "the loss that a gradient is taken of")
        if kind.name == "sum" or kind.name == "other" and has_rows(target):
            return self._facts.masked(seed) if shared else seed
        if shared:
            return self._facts.weighted(seed)
        # An empty shard's row keeps weight 1: a step that divides by zeros would get NaN.
        share = self._facts.weight
        return seed * tf.cast(tf.where(share > 0, share, 1), seed.dtype)

    def _sum(self, gradients: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
        """Sums gradients over the towers; joins IndexedSlices of embeddings, and keeps None."""
        to = self._collectives
        sums = iter(to.sum([g for g in gradients if isinstance(g, tf.Tensor)]))

        def join(part: tf.IndexedSlices) -> tf.IndexedSlices:
            if part.dense_shape is None:
                return tf.IndexedSlices(*to.sum([part.values]), to.first(part.indices))
            return tf.IndexedSlices(*to.add("join", [part.values, part.indices]), part.dense_shape)

        added = []
        for gradient, source in zip(gradients, sources, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                parts = separate_lookups(gradient, self._facts)
                parts = parts if isinstance(parts, tuple) else (parts,)
                added.append(join_lookups(tuple(map(join, parts)), source.shape))
            else:
                added.append(None if gradient is None else next(sums))
        return added

    def _jacobian(
        self, original: Callable, tape: tf.GradientTape, target: Any, *args: Any, **options: Any
    ) -> Any:
        """Computes a jacobian without collectives, because each of its gradients is of one row."""
        with gathered_by(None):
            slopes = original(tape, target, *args, **options)
        if self._collectives.is_outermost() and self._rows.fact(target).has_rows:
            for slope in tf.nest.flatten(slopes):
                if slope is not None and slope.shape.as_list().count(None) == 1:
                    self._rows.declare(slope, self._rows.fact(target))
        return slopes

    def _apply(
        self, original: Callable, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any],
        trainable_variables: Any = None,
    ) -> None:
        """Records an Update, which calls `original` on the parameter device when the step runs."""
        del original
        collectives, scope = self._collectives, self._scope
        collectives.check_outermost("applies gradients")
        if not grads:  # as in Keras: the trace that makes a model's layers finds no variables
            return
        if not optimizer.built:
            with scope.left():
                check_loss_scale(optimizer)
                optimizer.build(trainable_variables)
        if scope.is_unready:
            return
        variables = list(trainable_variables or optimized_variables(optimizer))
        what = f"{current_line()}: a gradient"
        gradients = [
            g if isinstance(g, tf.IndexedSlices) else collectives.of_batch(g, what) for g in grads
        ]
        assigned = scope.take_assigned([*variables, *optimizer.variables])
        needs = tf.nest.flatten([gradients, [v for _, v in assigned]], expand_composites=True)
        levels = [self._dependence.level(v) for v in needs if v is not None]
        levels += [before.level for before in collectives.updates]
        update = Update(optimizer, gradients, variables, assigned, max(levels, default=0))
        collectives.updates.append(update)
        scope.updated(update)

    def _update_state(
        self, original: Callable, metric: keras.metrics.Metric, values: Any,
        sample_weight: Any = None,
    ) -> None:
        """Replaces a shard's mean or sum by the whole batch's."""
        self._collectives.check_outermost(f"updates metric {metric.name!r}")
        values = tf.convert_to_tensor(values)
        what = f"what metric {metric.name!r} is updated with"
        check_rank(values, f"{current_line()}: {what}")
        if self._dependence.local(values):
            if not self._rows.check(values, what).has_rows:
                part = self._facts.part(tf.cast(values, metric.dtype), what)
                (values,) = self._collectives.sum([part])
        original(metric, values, sample_weight=sample_weight)

    def _compute_metrics(
        self, original: Callable, model: keras.Model, x: Any, y: Any, y_pred: Any,
        sample_weight: Any = None,
    ) -> dict[str, Any]:
        """Passes the rows of all towers to compiled metrics, because not every metric is a mean."""
        given = [y, y_pred, sample_weight]
        if compiled_metrics(model) is not None and not self._scope.is_unready:
            given = self._gathered(given) or given
        return original(model, x, *given)

    def _gathered(self, given: list[Any]) -> list[Any] | None:
        """Returns the values' rows of all towers, or None unless it is clear what these are.

        The values must be equal in all towers or have one row for each example. Beside one such
        value, others may have any fixed number of rows per example.
        """
        tensors = [value for value in tf.nest.flatten(given) if tf.is_tensor(value)]
        own = [fact for fact in map(self._rows.fact, tensors) if fact.local]
        are_rows = all(f.axis == 0 and f.each in (0, 1) and f.fault is None for f in own)
        has_one = not own or any(f.each == 1 for f in own)
        if not (self._collectives.is_outermost() and are_rows and has_one):
            return None
        gather = self._collectives.gather_marked
        return tf.nest.map_structure(lambda v: gather(v) if tf.is_tensor(v) else v, given)

    def _call_loss(
        self, original: Callable, loss: keras.losses.Loss, y_true: Any, y_pred: Any,
        sample_weight: Any = None,
    ) -> Any:
        """Passes the rows of all towers to a loss that is neither mean nor sum over examples."""
        given = [y_true, y_pred, sample_weight]
        if not self._scope.is_unready and self._needs_all_rows(original, loss, given):
            gathered = self._gathered(given)
            if gathered is None:
                warn_user(
                    f"{current_line()}: loss {loss.name!r} is neither a mean nor a sum over the "
                    "examples, and each tower has only its shard's rows. Call it outside of "
                    "tf.function, tf.cond and loops, on one row for each example or on "
                    "towers.gather(rows).",
                )
            given = gathered or given
        return original(loss, *given)

    def _needs_all_rows(
        self, original: Callable, loss: keras.losses.Loss, given: Sequence[Any]
    ) -> bool:
        """Returns whether a Keras loss is neither a mean nor, by its reduction, a sum.

        Such a loss may divide by the sum of weights or the number of unmasked steps. It is traced
        in a graph that is thrown away, so that its assignments have no effect.
        """
        flat = [value for value in tf.nest.flatten(given) if tf.is_tensor(value)]
        is_of_each = loss.reduction in ("none", None) and not overrides_call(loss)
        if is_of_each or any(self._rows.fact(value).fault for value in flat):
            return False
        with keras.StatelessScope(), read_as_they_are(), gathered_by(None):
            traced = tf.function(
                lambda: tf.convert_to_tensor(original(loss, *given)), autograph=False
            ).get_concrete_function()
        rows = Rows((inside, self._rows.fact(outside)) for outside, inside in traced.graph.captures)
        kind = rows.kind(traced.outputs[0])
        # Keras adds means to what a loss function returns, even if it is a sum.
        return kind.fault is not None or kind.name not in ("mean", loss_reduction(loss))

    def _call_layer(
        self, original: Callable, layer: keras.layers.Layer, *args: Any, **options: Any
    ) -> Any:
        """Raises ValueError if a shard's tensor enters a layer with a batch axis of fixed size."""
        for value in tf.nest.flatten(args[:1]):
            is_of_step = tf.is_symbolic_tensor(value) and value.graph is self._collectives.graph
            is_fixed = is_of_step and bool(value.shape.rank) and (value.shape[0] or 0) > 1
            if is_fixed and self._dependence.local(value, but_sizes=True):
                raise ValueError(
                    f"{current_line()} calls layer {layer.name!r} on {value.shape[0]} rows in "
                    "every tower: the batch size is written into the code, or the batch is not the "
                    "data's first axis, which towers divide. Take the size from the data: "
                    "tf.shape(x)[0]; put the batch first."
                )
        return original(layer, *args, **options)


def _owners(base: type, name: str) -> list[type]:
    """Returns a class, and all its subclasses that define this method."""
    subclasses: list[type] = base.__subclasses__()
    below = [owner for subclass in subclasses for owner in _owners(subclass, name)]
    return [base, *dict.fromkeys(owner for owner in below if name in vars(owner))]
