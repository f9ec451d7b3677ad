"""Times steps, with Keras callbacks, and function calls."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf


class Clock(keras.callbacks.Callback):
    """Records in `times` when the loss of each step is known."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        float((logs or {}).get("loss", 0.0))  # waits for a GPU; `fit` has already waited
        self.times.append(time.perf_counter())


class Stopwatch(keras.callbacks.Callback):
    """Times steps for a given duration, then stops the training.

    It waits for GPUs only before the first timed step and after the last. Reading the loss of each
    step would stop the host until the GPU is done, and then leave the GPU idle. That is also why
    it has no `on_train_batch_end`: with one, Keras' `fit` reads the loss after each step.

    seconds: duration of the timed steps.
    num_steps: number of timed steps.
    """

    def __init__(self, warm_up_steps: int, warm_up_seconds: float, timed_seconds: float) -> None:
        """
        Args:
            warm_up_steps, warm_up_seconds: the timing starts when both have passed.
            timed_seconds: the timing ends after this time, when the running step is done.
        """
        super().__init__()
        self.seconds = 0.0
        self.num_steps = 0
        self._warm_up = warm_up_steps, warm_up_seconds
        self._timed_seconds = timed_seconds
        self._created: float | None = None
        self._start: tuple[int, float] | None = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        now = time.perf_counter()
        if self._created is None:
            self._created = now
        if self._start is None:
            if batch >= self._warm_up[0] and now - self._created >= self._warm_up[1]:
                self._start = batch, synchronized_time()
        elif not self.num_steps and now - self._start[1] >= self._timed_seconds:
            first_batch, start = self._start
            self.seconds = synchronized_time() - start
            self.num_steps = batch - first_batch
            self.model.stop_training = True  # takes effect after this step


def throughput(times: Sequence[float], batch_size: int) -> dict[str, float]:
    """Returns {"examples_per_second", "timed_seconds"} of the steps after the first.

    times: when each step ended, in seconds.
    """
    seconds = times[-1] - times[0]
    return {
        "examples_per_second": (len(times) - 1) * batch_size / seconds,
        "timed_seconds": seconds,
    }


def synchronized_time() -> float:
    """Waits until all devices are idle and returns the time."""
    tf.test.experimental.sync_devices()
    return time.perf_counter()


def time_calls(function: Callable[[], Any], calls: int) -> float:
    """Returns the median seconds of a call, which must wait for its result."""
    seconds = []
    for _ in range(calls):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
