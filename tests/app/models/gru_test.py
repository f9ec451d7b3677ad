"""Two GRU layers, and the large model."""

import keras
import pytest

from towers.app import models


def test_gru_has_its_published_parameters_and_optimizer():
    source = models.load("gru")
    model = source.build(source.input_shape, source.num_classes)
    # 3 x 256 x (128 + 256 + 2), 3 x 256 x (256 + 256 + 2), dense 257 x 512 + 513 x 128
    assert model.count_params() == 888_448
    assert source.optimizer == "adam"


def test_gru_layers_are_configured_as_cudnn_computes_them():
    layers = [layer for layer in models.load("gru").build((49,), 128).layers
              if isinstance(layer, keras.layers.GRU)]
    for layer in layers:
        assert layer.activation is keras.activations.tanh
        assert layer.recurrent_activation is keras.activations.sigmoid
        assert layer.use_bias and not layer.unroll and layer.recurrent_dropout == 0
        assert layer.reset_after and layer.use_cudnn == "auto"
        assert layer.kernel_regularizer.l2 == pytest.approx(1e-6)
    assert [layer.units for layer in layers] == [256, 256]


@pytest.mark.parametrize("shape", [(49,), (49, 128)])
def test_large_gru_is_reached_by_module_and_function(shape, monkeypatch):
    # Its orthogonal matrices take seconds.
    monkeypatch.setattr(keras.initializers.Orthogonal, "__call__",
                        lambda self, shape, dtype=None: keras.ops.zeros(shape, dtype))
    source = models.load("towers.app.models.gru:build_large")
    assert source[2:5] == ((49, 128), 128, "adam")
    # gates x 1024 x (128 + 1024 + 2), 3 more of (1024 + 1024 + 2), dense 1025 x 512 + 513 x 128
    expected = 3 * 1024 * (1154 + 3 * 2050) + 1025 * 512 + 513 * 128
    assert source.build(shape, 128).count_params() == expected
