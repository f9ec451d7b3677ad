"""How long devices wait for stages that sleep: python -m tests.step.sleeping_stages S M"""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.machine.devices import GPU

L = keras.layers


class Sleeps(L.Layer):
    """Sleeps forward and backward, and notes when."""

    noted: list = []
    SECONDS = 0.04

    def sleep(self, x):
        begin = time.perf_counter()
        time.sleep(self.SECONDS)
        self.noted.append((begin, time.perf_counter()))
        return x

    def call(self, x):
        @tf.custom_gradient
        def slept(x):
            def asleep(value):
                slept = tf.numpy_function(self.sleep, [value], x.dtype, stateful=False)
                return tf.ensure_shape(slept, x.shape)

            return asleep(x), asleep

        return slept(x)


def share_waited(num_stages, num_towers):
    """The share of a step, of one device group, that devices do not sleep; the best of three."""
    layers = [layer for _ in range(num_stages) for layer in (L.Dense(2), Sleeps())]
    model = keras.Sequential([keras.Input((2,)), *layers])
    step = towers.TowerStep(
        model, "sgd", "mse", policy=GPU, num_towers=num_towers, gpus_per_tower=num_stages,
        devices=[f"/cpu:{i}" for i in range(num_stages)],
        stages=[layer.name for layer in layers[2::2]],
    )
    x = np.ones([num_towers, 2])
    step.train_batch(x, x)
    shares = []
    for _ in range(3):
        Sleeps.noted = []
        step.train_batch(x, x)
        begins, ends = zip(*Sleeps.noted, strict=True)
        assert len(begins) == 2 * num_stages * num_towers
        busy = len(begins) * Sleeps.SECONDS
        shares.append(1 - busy / (num_stages * (max(ends) - min(begins))))
    return min(shares)


if __name__ == "__main__":
    tf.config.threading.set_inter_op_parallelism_threads(16)
    stages, count = map(int, sys.argv[1:])
    towers.logical_cpus(stages, set_threads=False)
    print(share_waited(stages, count))
