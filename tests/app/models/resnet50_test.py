"""ResNet-50, as later implementations have it."""

import keras
import numpy as np

from towers.app import models
from towers.app.models import resnet50


def test_resnet50_has_its_published_parameters():
    source = models.load("resnet50")
    assert (source.input_shape, source.num_classes) == ((224, 224, 3), 1000)
    model = source.build((224, 224, 3), 1000)
    assert model.name == "resnet50"
    trainable = sum(v.value.shape.num_elements() for v in model.trainable_variables)
    assert trainable == 25_557_032  # torchvision's documentation


def test_resnet50_has_its_strides_in_the_3x3_convolutions():
    model = models.load("resnet50").build((224, 224, 3), 1000)
    layers = [layer for layer in model.layers if isinstance(layer, keras.layers.Conv2D)]
    assert len(layers) == 53  # 49, and 4 shortcuts'
    strided = [(layer.kernel_size[0], layer.output.shape[1:]) for layer in layers
               if layer.strides == (2, 2)]
    assert strided == [
        (7, (112, 112, 64)),
        (3, (28, 28, 128)), (1, (28, 28, 512)),  # a block, and its shortcut
        (3, (14, 14, 256)), (1, (14, 14, 1024)),
        (3, (7, 7, 512)), (1, (7, 7, 2048)),
    ]


def test_resnet50s_blocks_begin_as_their_shortcuts():
    model = resnet50.build_bottlenecks("small", (64, 64, 3), 10, num_blocks=(2, 1), filters=4)
    zeros = [not np.any(layer.gamma) for layer in model.layers
             if isinstance(layer, keras.layers.BatchNormalization)]
    # first convolution | block: 3, then its shortcut | block | block with its shortcut
    assert zeros == [False, *(False, False, True, False), *(False, False, True),
                     *(False, False, True, False)]
