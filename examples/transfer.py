"""Transfer learning: a frozen backbone of keras.applications with a new head.

    python -m examples.transfer

ResNet50V2 has random weights here, to need no download: WEIGHTS = "imagenet" makes it the real
thing. Prints the accuracy on MNIST from random features: about 0.78 after 3 epochs. The 23 million
frozen parameters are sent to the devices, but have no gradients, and nothing to average. To train
them, too, afterwards: `backbone.trainable = True`, and compile the parallel model anew. Keras 3.15
then updates the statistics of BatchNormalization even after `backbone(x, training=False)`. To keep
them, set `layer.trainable = False` for each BatchNormalization layer in `backbone.layers`.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without a GPU: logical CPU devices
WEIGHTS = None
EXAMPLES = 4_096
GLOBAL_BATCH = 128
EPOCHS = 3


def build(application: Callable = keras.applications.ResNet50V2) -> keras.Model:
    """Images float32 [N, 28, 28, 1] -> probabilities, float32 [N, 10]."""
    backbone = application(
        input_shape=(32, 32, 3), include_top=False, weights=WEIGHTS, pooling="avg"
    )
    backbone.trainable = False
    image = keras.Input((28, 28, 1))
    colour = L.concatenate([L.ZeroPadding2D(2)(L.Rescaling(2.0, offset=-1.0)(image))] * 3)
    features = backbone(colour)  # frozen BatchNormalization keeps its statistics, too
    scaled = L.LayerNormalization(epsilon=1e-12)(features)  # random features are tiny
    return keras.Model(image, L.Dense(10, activation="softmax")(scaled))


def main(
    examples: int = EXAMPLES,
    epochs: int = EPOCHS,
    application: Callable = keras.applications.ResNet50V2,
) -> dict[str, list[float]]:
    """Trains the head of an application and evaluates; returns `fit`'s history."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    data = mnist.load()
    x, y = (part[:examples] for part in data.train)
    test = tuple(part[:examples // 4] for part in data.test)
    with tf.device("/cpu:0"):
        model = build(application)
    parallel = towers.make_parallel(model, DEVICES)
    parallel.compile(
        keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return parallel.fit(
        x, y, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=2, validation_data=test
    ).history


if __name__ == "__main__":
    main()
