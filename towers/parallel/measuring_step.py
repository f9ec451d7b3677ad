"""Trains like the step of a parallel model, and measures the noise scale in some of the steps.

step:       1   2 ... 10   11 ... 19   20   21 ...
measured:   x   x      x               x             has another trace; the weights keep their bits
"""

import keras
import tensorflow as tf

from towers.divide.keras_steps import KerasSteps
from towers.divide.machines import Machine
from towers.step import checks
from towers.step.metrics import BatchMetrics, overrides
from towers.step.noise_scale import NoiseMetric
from towers.step.sharding import Placed
from towers.step.structures import Structure


class MeasuringStep:
    """Runs Keras' own `train_step` of a compiled model, and keeps its noise scale.

    step: the step of a whole batch. noise: the metric.
    """

    def __init__(self, model: keras.Model, machine: Machine) -> None:
        """Raises ValueError for one tower and for a custom `train_step`."""
        if overrides(model, "train_step"):
            raise ValueError(
                f"model {model.name!r} has a custom train_step, whose gradients towers.NoiseScale "
                "does not know: leave towers.NoiseScale() out."
            )
        checks.check_counts(machine.exchange.num_towers, None, noise_scale=True)
        with tf.device(machine.home):
            self.noise = NoiseMetric()
        self._optimizer = model.optimizer
        self._steps = KerasSteps(
            model, model.trainable_variables, lambda name: machine, nonfinite="apply",
            noise=self.noise, metrics=BatchMetrics(model, machine.home),
        )  # fmt: skip
        self.step = self._steps.divided["train"]

    def run(self, data: Structure, placed: Placed) -> dict[str, tf.Tensor]:
        """Makes one update outside of a graph; returns its logs, with "noise_scale"."""
        # tf.random would begin again in a second function, so a model that uses it has one.
        is_measured = self.step.has_unsaved_noise or self.noise.is_due(self._optimizer)
        if is_measured:
            method = self._steps.train_measured
        else:
            method = self._steps.train
        logs, _ = self.step.run(data, placed, method)
        return logs  # type: ignore[no-any-return]

    def run_in_graph(self, data: Structure) -> dict[str, tf.Tensor]:
        """Makes one update within the caller's graph, without a measurement; returns its logs."""
        return self._steps.train(data, None)[0]  # type: ignore[no-any-return]
