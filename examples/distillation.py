"""Trains a small student on the outputs of a larger teacher, in a custom train_step.

    python -m examples.distillation

The student learns from the teacher's softened probabilities instead of labels (Hinton et al. 2015,
https://arxiv.org/abs/1503.02531). The example prints the test accuracy of both: about 0.97 for the
teacher with 670,000 parameters, and 0.935 for the student with 19,000.
"""

from typing import Any

import keras
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
EXAMPLES = 20_000
GLOBAL_BATCH = 128
EPOCHS = 6
TEMPERATURE = 2.0


def build(name: str, *widths: int) -> keras.Model:
    """Images [N, 28, 28, 1] -> logits [N, 10]."""
    first = [keras.Input((28, 28, 1)), L.Flatten()]
    hidden = [L.Dense(width, activation="relu") for width in widths]
    return keras.Sequential([*first, *hidden, L.Dense(10)], name=name)


class Distiller(keras.Model):
    """Trains the student, not the teacher."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher
        teacher.trainable = False
        self.build((None, 28, 28, 1))

    def call(self, images: Any) -> Any:
        """Returns the student's logits."""
        return self.student(images)

    def train_step(self, data: Any) -> dict[str, Any]:
        """Makes one update of the student; only the metrics use the labels."""
        images, labels = data
        soft = tf.nn.softmax(self.teacher(images, training=False) / TEMPERATURE)
        with tf.GradientTape() as tape:
            logits = self.student(images, training=True)
            loss = keras.losses.KLDivergence()(soft, tf.nn.softmax(logits / TEMPERATURE))
        weights = self.student.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.metrics[0].update_state(loss)  # Keras' mean of the loss over an epoch
        return self.compute_metrics(images, labels, logits)

    def test_step(self, data: Any) -> dict[str, Any]:
        """Updates the loss and the metrics on a batch."""
        images, labels = data
        soft = tf.nn.softmax(self.teacher(images, training=False) / TEMPERATURE)
        logits = self.student(images, training=False)
        self.metrics[0].update_state(
            keras.losses.KLDivergence()(soft, tf.nn.softmax(logits / TEMPERATURE))
        )
        return self.compute_metrics(images, labels, logits)


def main(examples: int = EXAMPLES, epochs: int = EPOCHS) -> dict[str, list[float]]:
    """Trains the teacher, then the student; returns the history of the student's `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    data = mnist.load()
    x, y = (part[:examples] for part in data.train)
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
        teacher, student = build("teacher", 512, 512), build("student", 24)
        distiller = Distiller(student, teacher)

    teacher.trainable = True
    parallel = towers.make_parallel(teacher, DEVICES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    parallel.compile("adam", loss, metrics=["accuracy"])
    parallel.fit(x, y, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=0)
    print(f"teacher: test accuracy {parallel.evaluate(*data.test, verbose=0)[1]:.4f}")
    teacher.trainable = False

    parallel = towers.make_parallel(distiller, DEVICES)
    parallel.compile(keras.optimizers.Adam(0.003), metrics=["accuracy"])
    history = parallel.fit(
        x, y, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=2, validation_data=data.test
    ).history
    print(f"student: test accuracy {history['val_accuracy'][-1]:.4f}")
    return history


if __name__ == "__main__":
    main()
