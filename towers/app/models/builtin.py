"""Builds the built-in models: two convolutional networks, an MLP, recurrent and residual networks.

A function takes the shape of one example and the number of classes. It returns a built model:
float32 [N, *input_shape] -> probabilities, float32 [N, num_classes].
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import keras
from keras.layers import Add, BatchNormalization, CategoryEncoding, Conv2D, Dense, Dropout, Flatten
from keras.layers import GlobalAveragePooling2D, MaxPooling2D, ReLU, Reshape, ZeroPadding2D

Shape = tuple[int, ...]  # of one example


def cnn(input_shape: Shape, num_classes: int) -> keras.Model:
    """Builds the Keras MNIST convnet, with 1,199,882 parameters at (28, 28, 1) and 10 classes.

    Source of layers and dropout rates: keras-team/keras 2.x, examples/mnist_cnn.py, which reaches a
    test accuracy of 0.9925 after 12 epochs at a global batch of 128. Images: at least (6, 6, 1).
    """
    convolutions = [Conv2D(32, 3, activation="relu"), Conv2D(64, 3, activation="relu")]
    return _classifier("cnn", input_shape, num_classes, convolutions)


def notebook_cnn(input_shape: Shape, num_classes: int) -> keras.Model:
    """Builds the Keras multi-GPU notebook's convnet, with 2,354,250 parameters at (28, 28, 1).

    The notebook reports a test accuracy of 0.989 to 0.993 after 12 epochs with 128 examples a
    tower. Images: at least (8, 8, 1).
    """
    convolutions = [
        Conv2D(32, 3, activation="relu"),
        Conv2D(256, 3, activation="relu"),
        BatchNormalization(),
        Conv2D(128, 3, activation="relu"),
    ]
    return _classifier("notebook_cnn", input_shape, num_classes, convolutions)


def mlp(input_shape: Shape, num_classes: int) -> keras.Model:
    """Builds a perceptron of 784-2048-2048-10 units on MNIST, with 5,824,522 parameters.

    Its width makes averaging and update dominate a step. It flattens examples of any shape.
    """
    model = keras.Sequential([keras.Input(input_shape), Flatten()], name="mlp")
    for _ in range(2):
        model.add(Dense(2048, activation="relu"))
    model.add(Dense(num_classes, activation="softmax"))
    return model


def _classifier(name: str, input_shape: Shape, num_classes: int, convolutions: list) -> keras.Model:
    return keras.Sequential(
        [
            keras.Input(input_shape),
            *convolutions,
            MaxPooling2D(2),
            Dropout(0.25),
            Flatten(),
            Dense(128, activation="relu"),
            Dropout(0.5),
            Dense(num_classes, activation="softmax"),
        ],
        name=name,
    )


# Layers, dense 512, L2 and Adam come from a benchmark of recurrent networks on several GPUs.
_RECURRENT_L2 = keras.regularizers.L2(1e-6)  # for all kernels
# Dropout acts only on non-recurrent connections: W. Zaremba, I. Sutskever, O. Vinyals, "Recurrent
# Neural Network Regularization", arXiv 1409.2329. The rate is not from the paper.
_DROPOUT = 0.2


def rnn(
    name: str,
    layer: Callable[..., keras.layers.Layer],
    input_shape: Shape,
    num_classes: int,
    *,
    num_layers: int,
    units: int,
    dense_units: int = 512,
) -> keras.Model:
    """Builds a model that reads a sequence and predicts the next element.

    The recurrent layers keep Keras' defaults (tanh, sigmoid, biases, no recurrent dropout, not
    unrolled; GRU: reset_after), because Keras then uses cuDNN on a GPU.

    layer: keras.layers.GRU or LSTM.
    input_shape: (steps,) for numbers 0 ... num_classes - 1, int32, which the model encodes one-hot
        on the tower's device, so that the input stays small; or (steps, ...) for one vector in each
        step, such as an image's rows from top to bottom.
    """
    steps, *step_shape = input_shape
    model = keras.Sequential(name=name)
    if step_shape:
        model.add(keras.Input(input_shape))
    else:
        step_shape = [num_classes]
        model.add(keras.Input(input_shape, dtype="int32"))
        model.add(CategoryEncoding(num_classes, output_mode="one_hot"))
    # CategoryEncoding drops the axis of a single step.
    model.add(Reshape((steps, math.prod(step_shape))))
    for index in range(num_layers):
        model.add(
            layer(
                units,
                return_sequences=index < num_layers - 1,
                kernel_regularizer=_RECURRENT_L2,
                recurrent_regularizer=_RECURRENT_L2,
            )
        )
        model.add(Dropout(_DROPOUT))
    model.add(Dense(dense_units, activation="relu", kernel_regularizer=_RECURRENT_L2))
    model.add(Dropout(_DROPOUT))
    model.add(Dense(num_classes, activation="softmax", kernel_regularizer=_RECURRENT_L2))
    return model


# L2 acts only on kernels. Both papers decay weights by 1e-4 * w in each update, which is the
# gradient of 1e-4 / 2 * sum(w^2).
_RESIDUAL_L2 = keras.regularizers.L2(1e-4 / 2)
# Source: Goyal et al., section 5.1; epsilon is from the TensorFlow model garden, resnet_model.py.
BATCH_NORM_MOMENTUM, BATCH_NORM_EPSILON = 0.9, 1e-5


def build_small(name: str, input_shape: Shape, num_classes: int, *, num_blocks: int) -> keras.Model:
    """Builds a residual network of 6 * num_blocks + 2 layers.

    Three stages have 16, 32 and 64 filters and halve the image in between (He et al., section 4.2).
    Shortcuts have no parameters: they take every second pixel and add channels of zeros (section
    3.3, option A). Table 6 gives CIFAR-10's test error: 0.0875 with 3 blocks, 0.0697 with 9.
    """
    inputs = _image(name, input_shape)
    x = convolve(inputs, 16, 3)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(num_blocks):
            strides = 2 if stage > 0 and block == 0 else 1
            residual = convolve(x, filters, 3, strides)
            residual = convolve(residual, filters, 3, relu=False)
            if strides > 1:
                x = x[:, ::strides, ::strides]
            if missing := filters - x.shape[-1]:
                x = keras.ops.pad(x, [[0, 0], [0, 0], [0, 0], [0, missing]])
            x = ReLU()(Add()([residual, x]))
    return keras.Model(inputs, classify(x, num_classes), name=name)


def build_bottlenecks(
    name: str,
    input_shape: Shape,
    num_classes: int,
    *,
    num_blocks: Sequence[int],
    filters: int = 64,
) -> keras.Model:
    """Builds a residual network of 3 * sum(num_blocks) + 2 layers; it halves images between stages.

    The layers follow table 1 of He et al., with two changes from section 5.1 of Goyal et al. The
    3x3 convolution of a bottleneck has the stride of 2, not the 1x1 before it, as in NVIDIA's
    "v1.5". The scale of each block's last BatchNormalization starts at 0, so that each block starts
    as its shortcut. The 3x3 convolutions of the first stage have `filters` filters.
    """
    inputs = _image(name, input_shape)
    x = convolve(inputs, filters, 7, strides=2)
    # After a ReLU, the padding's zeros never exceed a pixel.
    x = MaxPooling2D(3, strides=2)(ZeroPadding2D(1)(x))
    for stage, count in enumerate(num_blocks):
        width = filters * 2**stage
        for block in range(count):
            strides = 2 if stage > 0 and block == 0 else 1
            residual = convolve(x, width, 1)
            residual = convolve(residual, width, 3, strides)
            residual = convolve(residual, 4 * width, 1, relu=False, gamma="zeros")
            if x.shape[-1] != 4 * width:  # the first block of each stage
                x = convolve(x, 4 * width, 1, strides, relu=False)
            x = ReLU()(Add()([residual, x]))
    return keras.Model(inputs, classify(x, num_classes), name=name)


resnet20 = partial(build_small, "resnet20", num_blocks=3)
resnet50 = partial(build_bottlenecks, "resnet50", num_blocks=(3, 4, 6, 3))


def resnet(input_shape: Shape, num_classes: int) -> keras.Model:
    """Builds ResNet-20 for images lower or narrower than 64 pixels, ResNet-50 for others."""
    if min(input_shape[:2], default=0) < 64:  # ResNet-50 begins with two strides of 2
        return resnet20(input_shape, num_classes)
    return resnet50(input_shape, num_classes)


def convolve(
    x: keras.KerasTensor,
    filters: int,
    size: int,
    strides: int = 1,
    *,
    relu: bool = True,
    gamma: str = "ones",
) -> keras.KerasTensor:
    """Applies convolution without bias, BatchNormalization and, if `relu`, ReLU.

    With strides, the padding is size // 2 on each side, as in the papers' code; "same" would pad
    the far side more. So windows have their centers at a strided shortcut's pixels.
    """
    if strides > 1 and size > 1:
        x = ZeroPadding2D(size // 2)(x)
    x = Conv2D(
        filters,
        size,
        strides,
        padding="same" if strides == 1 else "valid",
        use_bias=False,
        kernel_initializer="he_normal",  # He et al., "Delving Deep into Rectifiers", 2015
        kernel_regularizer=_RESIDUAL_L2,
    )(x)
    x = BatchNormalization(
        momentum=BATCH_NORM_MOMENTUM, epsilon=BATCH_NORM_EPSILON, gamma_initializer=gamma
    )(x)
    if relu:
        x = ReLU()(x)
    return x


def classify(x: keras.KerasTensor, num_classes: int) -> keras.KerasTensor:
    """Applies global average pooling and softmax: [N, h, w, channels] -> [N, num_classes]."""
    x = GlobalAveragePooling2D()(x)
    return Dense(
        num_classes,
        activation="softmax",
        kernel_regularizer=_RESIDUAL_L2,
        kernel_initializer=keras.initializers.RandomNormal(stddev=0.01),  # Goyal et al., 5.1
    )(x)


def _image(name: str, input_shape: Shape) -> keras.KerasTensor:
    if len(input_shape) != 3:
        raise ValueError(
            f"model={name} needs images (height, width, channels), but the examples have shape "
            f"{tuple(input_shape)}; choose another model or data set."
        )
    return keras.Input(input_shape)
