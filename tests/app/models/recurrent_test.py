"""What the recurrent models read: notes, vectors, an image's rows."""

import keras
import numpy as np
import pytest

from towers.app import models


def recurrent_layers(name, shape):
    kinds = keras.layers.GRU, keras.layers.LSTM
    return [layer for layer in models.load(name).build(shape, 20).layers
            if isinstance(layer, kinds)]


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_a_model_encodes_notes_one_hot_itself(name):
    notes = np.random.default_rng(0).integers(0, 20, (3, 7))
    from_notes = models.load(name).build((7,), 20)
    from_vectors = models.load(name).build((7, 20), 20)
    from_vectors.set_weights(from_notes.get_weights())
    assert from_notes.inputs[0].dtype == "int32"
    np.testing.assert_array_equal(
        from_notes(notes), from_vectors(np.eye(20, dtype=np.float32)[notes])
    )
    assert models.load(name).build((1,), 20)(np.ones((3, 1), np.int32)).shape == (3, 20)


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_layers_are_configured_as_cudnn_computes_them(name):
    layers = recurrent_layers(name, (7,))
    assert [layer.units for layer in layers] == [256, 256]
    for layer in layers:
        assert layer.activation is keras.activations.tanh
        assert layer.recurrent_activation is keras.activations.sigmoid
        assert layer.use_bias and not layer.unroll and layer.recurrent_dropout == 0
        assert getattr(layer, "reset_after", True) and layer.use_cudnn == "auto"
        assert layer.kernel_regularizer.l2 == pytest.approx(1e-6)


def test_images_are_read_row_by_row():
    assert recurrent_layers("gru", (12, 14, 3))[0].input.shape == (None, 12, 42)
