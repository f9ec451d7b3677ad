"""Keras callbacks that time steps, of `fit` and of towers alike."""

import time
from typing import Any

import keras
import tensorflow as tf


class Clock(keras.callbacks.Callback):
    """Notes when each step ends, once its loss is known."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        float((logs or {}).get("loss", 0.0))  # waits for a GPU; `fit` has done so already
        self.times.append(time.perf_counter())


class Stopwatch(keras.callbacks.Callback):
    """Times steps for some seconds, then ends the training; waits for GPUs only at both ends.

    Reading each step's loss would make the host wait for the GPU, and the GPU then for the host.
    `on_train_batch_begin` is where that is avoided in Keras' `fit`, too: any callback with an
    `on_train_batch_end` makes it read the loss and the metrics of each step before the next one;
    without one a thread of Keras' own reads them, while the steps go on.

    seconds: that were timed.
    num_steps: that were timed.
    """

    def __init__(self, warm_up_steps: int, warm_up_seconds: float, timed_seconds: float) -> None:
        """
        Args:
            warm_up_steps, warm_up_seconds: both must have passed before timing begins.
            timed_seconds: after which it ends; the steps that are under way then count, too.
        """
        super().__init__()
        self.seconds = 0.0
        self.num_steps = 0
        self._warm_up = warm_up_steps, warm_up_seconds
        self._timed_seconds = timed_seconds
        self._created: float | None = None
        self._begin: tuple[int, float] | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.perf_counter()
        if self._created is None:
            self._created = now
        if self._begin is None:
            if batch >= self._warm_up[0] and now - self._created >= self._warm_up[1]:
                self._begin = batch, synchronized_time()
        elif not self.num_steps and now - self._begin[1] >= self._timed_seconds:
            first, begin = self._begin
            self.seconds = synchronized_time() - begin
            self.num_steps = batch - first
            self.model.stop_training = True  # once the step that begins here is done


def synchronized_time() -> float:
    """The time once every device has done all that it was given."""
    tf.test.experimental.sync_devices()
    return time.perf_counter()
