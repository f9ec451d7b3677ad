"""The parts of the residual networks: convolutions with BatchNormalization, and the two ends."""

import keras

# On kernels alone. He et al. and Goyal et al. decay weights by 1e-4 * w in each update: the
# gradient of 1e-4 / 2 * sum(w^2).
L2 = 1e-4 / 2
# Goyal et al., section 5.1; epsilon: the TensorFlow model garden's resnet_model.py.
BATCH_NORM_MOMENTUM, BATCH_NORM_EPSILON = 0.9, 1e-5


def check_is_image(input_shape: tuple[int, ...], name: str) -> None:
    """Raises ValueError for examples that are no images."""
    if len(input_shape) != 3:
        raise ValueError(
            f"model={name} needs images (height, width, channels), but the examples have shape "
            f"{tuple(input_shape)}; choose another model or data set."
        )


def convolve(
    x: keras.KerasTensor,
    filters: int,
    size: int,
    strides: int = 1,
    *,
    relu: bool = True,
    gamma: str = "ones",
) -> keras.KerasTensor:
    """Convolution without bias, BatchNormalization, ReLU; [N, ceil(h / strides), ..., filters].

    Strided windows are padded by size // 2 on each side, as in the papers' own code ("same" would
    pad the far side more): their centers are the pixels that a strided shortcut takes.

    Args:
        x: [N, h, w, channels], symbolic.
        filters: of the convolution.
        size: of its window, odd.
        strides: in both directions.
        relu: whether a ReLU follows.
        gamma: the initializer of the BatchNormalization's scale.
    """
    if strides > 1 and size > 1:
        x = keras.layers.ZeroPadding2D(size // 2)(x)
    x = keras.layers.Conv2D(
        filters,
        size,
        strides=strides,
        padding="same" if strides == 1 else "valid",
        use_bias=False,
        kernel_initializer="he_normal",  # He et al., "Delving Deep into Rectifiers", 2015
        kernel_regularizer=keras.regularizers.L2(L2),
    )(x)
    x = keras.layers.BatchNormalization(
        momentum=BATCH_NORM_MOMENTUM, epsilon=BATCH_NORM_EPSILON, gamma_initializer=gamma
    )(x)
    return keras.layers.ReLU()(x) if relu else x


def add_shortcut(x: keras.KerasTensor, shortcut: keras.KerasTensor) -> keras.KerasTensor:
    """ReLU(x + shortcut), the end of a block."""
    return keras.layers.ReLU()(keras.layers.Add()([x, shortcut]))


def classify(x: keras.KerasTensor, num_classes: int) -> keras.KerasTensor:
    """Global average pooling and softmax: [N, h, w, channels] -> [N, num_classes]."""
    x = keras.layers.GlobalAveragePooling2D()(x)
    return keras.layers.Dense(
        num_classes,
        activation="softmax",
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),  # Goyal et al., 5.1
        kernel_regularizer=keras.regularizers.L2(L2),
    )(x)
