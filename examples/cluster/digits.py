"""One model with the same weights on any number of devices and workers.

    python examples/cluster/digits.py 2 weights.npz

trains on two devices and writes the weights to weights.npz. The page
docs/cluster.md also starts this script on two processes and two machines.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import towers
from towers.datasets import mnist

TOWERS = 4  # over all devices of all workers: this number defines the results
devices, weights_file = int(sys.argv[1]), sys.argv[2]

worker = towers.join_workers()  # first: a model's variables start TensorFlow
keras.utils.set_random_seed(1)  # the same weights and order in every worker
if tf.config.list_physical_devices("GPU"):
    tf.config.experimental.enable_op_determinism()
else:
    towers.logical_cpus(devices, num_towers=TOWERS)

model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(16, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
parallel = towers.make_parallel(model, devices, num_towers=TOWERS)
parallel.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

images, labels = mnist.load().train
parallel.fit(
    images[:10_000],
    labels[:10_000],
    batch_size=128,
    epochs=2,
    verbose=2 if worker.is_chief else 0,
)
if worker.is_chief:
    np.savez(weights_file, *model.get_weights())
