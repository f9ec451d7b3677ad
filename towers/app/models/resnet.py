"""Residual networks: ResNet-20 and ResNet-56 for small images; for larger ones, ResNet-50."""

import keras

from towers.app.models import resnet50
from towers.app.models.residual import add_shortcut, check_is_image, classify, convolve

INPUT_SHAPE = (32, 32, 3)
NUM_CLASSES = 10
# He et al. use SGD with momentum 0.9 at 0.1, divided by 10 at 32,000 and 48,000 steps. A Keras
# name alone means no momentum; Adam at its default is what the Keras 2.x example
# cifar10_resnet.py begins with.
OPTIMIZER = "adam"
SMALL = 64  # pixels; ResNet-50 begins with two strides of 2, which leave nothing of less


def build(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """ResNet-20 for images lower or narrower than 64 pixels, ResNet-50 (see there) for others.

    Args:
        input_shape: (height, width, channels) of one image.
        num_classes: the number of labels 0 ... num_classes - 1.

    Returns:
        float32 [N, height, width, channels] -> probabilities, float32 [N, num_classes].

    Raises:
        ValueError: input_shape is no image's.
    """
    check_is_image(input_shape, "resnet")
    if min(input_shape[:2]) < SMALL:
        return build_20(input_shape, num_classes)
    return resnet50.build(input_shape, num_classes)


def build_20(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A built model, 269,722 trainable parameters at (32, 32, 3) and 10 classes.

    CIFAR-10's test error after 64,000 steps at a global batch of 128, with images padded, cropped
    and flipped at random: 0.0875 (He et al., table 6). Args, Returns, Raises: as of `build`.
    """
    check_is_image(input_shape, "resnet20")
    return build_small("resnet20", input_shape, num_classes, num_blocks=3)


def build_56(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A built model, 853,018 trainable parameters at (32, 32, 3) and 10 classes.

    CIFAR-10's test error, as above: 0.0697. Args, Returns, Raises: as of `build`.
    """
    check_is_image(input_shape, "resnet56")
    return build_small("resnet56", input_shape, num_classes, num_blocks=9)


def build_small(
    name: str, input_shape: tuple[int, ...], num_classes: int, *, num_blocks: int
) -> keras.Model:
    """A residual network of 6 * num_blocks + 2 layers.

    K. He, X. Zhang, S. Ren, J. Sun, "Deep Residual Learning for Image Recognition", 2015,
    section 4.2: three stages of 16, 32 and 64 filters, the image halved between them; shortcuts
    without parameters (option A).
    """
    inputs = x = keras.Input(input_shape)
    x = convolve(x, 16, 3)
    for stage, filters in enumerate((16, 32, 64)):
        for block in range(num_blocks):
            x = _block(x, filters, strides=2 if stage > 0 and block == 0 else 1)
    return keras.Model(inputs, classify(x, num_classes), name=name)


def _block(x: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    residual = convolve(x, filters, 3, strides)
    residual = convolve(residual, filters, 3, relu=False)
    return add_shortcut(residual, _shortcut(x, filters, strides))


def _shortcut(x: keras.KerasTensor, filters: int, strides: int) -> keras.KerasTensor:
    """Every strides-th pixel, and zeros as further channels: He et al., section 3.3, option A."""
    if strides > 1:
        x = x[:, ::strides, ::strides]
    missing = filters - x.shape[-1]
    return keras.ops.pad(x, [[0, 0], [0, 0], [0, 0], [0, missing]]) if missing else x
