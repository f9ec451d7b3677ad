"""Watches the update of a step while it is traced: its loss, its gradients and its operations.

    train_step    loss ---> optimizer.scale_loss        seen
                  gradients ---> optimizer.apply        seen; made if all are finite, or left out

Two methods of the optimizer are replaced while the step is traced.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import keras
import tensorflow as tf

from towers.divide.parts import Gradient, plain_gradients
from towers.machine.replaced import replaced
from towers.step.errors import are_finite


class WatchedUpdate:
    """Holds what an optimizer receives from Keras' train_step, once it has been traced.

    loss: before it is scaled. gradients: by trainable variable; slices are (values, indices).
    finite: [1 + V] bool, whether the loss and each checked gradient is finite; None: unchecked.
    operations: the update's.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, checked: Collection[str]) -> None:
        """checked: which of "loss" and "gradients" must be finite; otherwise no update is made."""
        self._optimizer, self._checked = optimizer, checked
        self.loss: tf.Tensor | None = None
        self.gradients: list[Gradient] = []
        self.finite: tf.Tensor | None = None
        self.operations: list[tf.Operation] = []

    @contextmanager
    def made(self) -> Iterator[None]:
        """Inside the context, the optimizer makes the update if what is checked is finite."""

        def scaling(
            scale_loss: Callable[[tf.Tensor], tf.Tensor],
        ) -> Callable[[tf.Tensor], tf.Tensor]:
            def scale(loss: tf.Tensor) -> tf.Tensor:
                self.loss = loss
                return scale_loss(loss)

            return scale

        with (
            replaced(self._optimizer, "scale_loss", scaling),
            replaced(self._optimizer, "apply", self._watched),
        ):
            yield

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside the context, the optimizer makes no update and scales no loss."""

        def keep_loss(loss: tf.Tensor) -> tf.Tensor:
            self.loss = loss
            return loss

        def keep_gradients(
            gradients: Sequence[tf.Tensor | tf.IndexedSlices | None], variables: object = None
        ) -> None:
            self.gradients = plain_gradients(gradients)

        with (
            replaced(self._optimizer, "scale_loss", lambda _: keep_loss),
            replaced(self._optimizer, "apply", lambda _: keep_gradients),
        ):
            yield

    def _watched(self, apply: Callable[..., None]) -> Callable[..., None]:
        def watched(
            gradients: Sequence[tf.Tensor | tf.IndexedSlices | None],
            trainable_variables: object = None,
        ) -> None:
            graph = tf.compat.v1.get_default_graph()
            self.gradients = plain_gradients(gradients)
            if self._checked:
                checked = gradients if "gradients" in self._checked else ()
                self.finite = are_finite(self.loss, list(checked))
            first = len(graph.get_operations())
            if self.finite is None:
                apply(gradients, trainable_variables)
            else:
                tf.cond(
                    tf.reduce_all(self.finite),
                    lambda: _done(apply, gradients, trainable_variables), lambda: tf.constant(0),
                )  # fmt: skip
            self.operations = graph.get_operations()[first:]

        return watched


def _done(apply: Callable[..., None], *arguments: object) -> tf.Tensor:
    """Makes an update; returns a constant, because a branch of a condition has a result."""
    apply(*arguments)
    return tf.constant(0)
