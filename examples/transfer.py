"""Trains a new head on a frozen backbone of keras.applications.

    python -m examples.transfer

ResNet50V2 has random weights here, so that nothing is downloaded. The accuracy on MNIST from its
random features is about 0.8 after 3 epochs. Set WEIGHTS = "imagenet" for pretrained weights. The
23 million frozen parameters are copied to the devices, but they have no gradients.

To fine-tune the backbone afterwards, set `backbone.trainable = True` and compile the parallel model
again. Keras 3.15 then updates the statistics of BatchNormalization, even with
`backbone(x, training=False)`. To keep them, set `layer.trainable = False` for each
BatchNormalization layer in `backbone.layers`.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

import towers
from towers.datasets import mnist

L = keras.layers
GPUS = len(tf.config.list_physical_devices("GPU"))
DEVICES = GPUS or 2  # without GPUs: logical CPU devices
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
    features = backbone(colour)  # frozen, so BatchNormalization keeps its statistics
    scaled = L.LayerNormalization(epsilon=1e-12)(features)  # random features are tiny
    return keras.Model(image, L.Dense(10, activation="softmax")(scaled))


def main(
    examples: int = EXAMPLES,
    epochs: int = EPOCHS,
    application: Callable = keras.applications.ResNet50V2,
) -> dict[str, list[float]]:
    """Trains the head and evaluates; returns the history of `fit`."""
    if not GPUS:
        towers.logical_cpus(DEVICES)
    keras.utils.set_random_seed(0)
    data = mnist.load()
    x, y = (part[:examples] for part in data.train)
    test = tuple(part[: examples // 4] for part in data.test)
    with tf.device("/cpu:0"):  # keeps the parameters in host memory
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
