"""ResNet-50 v1.5, for images of ImageNet's size."""

from collections.abc import Sequence

import keras

from towers.app.models.residual import add_shortcut, check_is_image, classify, convolve

INPUT_SHAPE = (224, 224, 3)
NUM_CLASSES = 1000
# Goyal et al. use SGD with momentum 0.9 at 0.1 for each 256 examples of the global batch, warmed
# up over 5 epochs. A Keras name alone means no momentum: Adam trains at its default.
OPTIMIZER = "adam"


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A built model, 25,557,032 trainable parameters at (224, 224, 3) and 1,000 classes.

    K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2015, table
    1, changed twice as in P. Goyal et al., "Accurate, Large Minibatch SGD: Training ImageNet in 1
    Hour", 2017, section 5.1:

    - the 3x3 convolution of a bottleneck has the stride of 2, not the 1x1 before it. That is
      NVIDIA's "v1.5", 0.5 points more accurate and 5% slower (catalog.ngc.nvidia.com, ResNet v1.5);
    - the scale of each block's last BatchNormalization begins at 0, so that a block begins as
      its shortcut.

    Args:
        input_shape: (height, width, channels) of one image.
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        float32 [N, height, width, channels] -> probabilities, float32 [N, num_classes].

    Raises:
        ValueError: input_shape is no image's.
    """
    check_is_image(input_shape, "resnet50")
    return build_bottlenecks("resnet50", input_shape, num_classes, num_blocks=(3, 4, 6, 3))


def build_bottlenecks(
    name: str,
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    num_blocks: Sequence[int],
    filters: int = 64,
) -> keras.Model:
    """A residual network of 3 * sum(num_blocks) + 2 layers.

    Args:
        name: of the model.
        input_shape, num_classes: as of `build`.
        num_blocks: of each stage; the image is halved between stages.
        filters: of the first stage's 3x3 convolutions; doubled from stage to stage.
    """
    inputs = x = keras.Input(input_shape)
    x = convolve(x, filters, 7, strides=2)
    # After a ReLU, zeros around the image never win.
    x = keras.layers.MaxPooling2D(3, strides=2)(keras.layers.ZeroPadding2D(1)(x))
    for stage, count in enumerate(num_blocks):
        for block in range(count):
            x = _block(x, filters * 2**stage, 2 if stage > 0 and block == 0 else 1)
    return keras.Model(inputs, classify(x, num_classes), name=name)


def _block(x: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    residual = convolve(x, filters, 1)
    residual = convolve(residual, filters, 3, strides)
    residual = convolve(residual, 4 * filters, 1, relu=False, gamma="zeros")
    if x.shape[-1] != 4 * filters:  # the first block of each stage
        x = convolve(x, 4 * filters, 1, strides, relu=False)
    return add_shortcut(residual, x)
