"""What the recurrent models read: notes, vectors, an image's rows."""

import keras
import numpy as np
import pytest

from towers.app import models


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_recurrent_model_encodes_notes_one_hot_itself(name):
    notes = np.random.default_rng(0).integers(0, 20, (3, 7))
    from_notes = models.load(name).build((7,), 20)
    from_vectors = models.load(name).build((7, 20), 20)
    from_vectors.set_weights(from_notes.get_weights())
    assert from_notes.inputs[0].dtype == "int32"
    np.testing.assert_array_equal(
        from_notes(notes), from_vectors(np.eye(20, dtype=np.float32)[notes])
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_recurrent_model_reads_a_melody_of_a_single_note(steps):
    assert models.load("gru").build((steps,), 20)(np.ones((3, steps), np.int32)).shape == (3, 20)


def test_images_are_read_row_by_row():
    layers = models.load("gru").build((12, 14, 3), 10).layers
    first = next(layer for layer in layers if isinstance(layer, keras.layers.GRU))
    assert first.input.shape == (None, 12, 42)
