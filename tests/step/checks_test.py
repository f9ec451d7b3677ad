"""What towers cannot compute is refused by its name, before anything is traced."""

import keras
import pytest

from towers.step import checks

L = keras.layers


def test_a_built_model_is_accepted_and_an_unbuilt_one_is_told_how_to_be_built():
    checks.check_model(keras.Sequential([keras.Input((4,)), L.Dense(1)]))
    with pytest.raises(ValueError, match="'late' is not built.*keras.Input, or call it"):
        checks.check_model(keras.Sequential([L.Dense(1)], name="late"))


def test_a_stateful_recurrent_layer_is_refused_by_its_name_also_inside_a_wrapper():
    layer = L.GRU(1, stateful=True, name="remembers")
    model = keras.Sequential([keras.Input((5, 6), batch_size=4), L.Bidirectional(layer)])
    with pytest.raises(ValueError, match="remembers.* is stateful=True"):
        checks.check_model(model)
    checks.check_model(keras.Sequential([keras.Input((5, 6)), L.GRU(1)]))


def test_float8_layers_are_refused_of_several_towers():
    """Their history of largest numbers would be added up."""
    model = keras.Sequential([L.Input((4,)), L.Dense(2, dtype="float8_from_float32")])
    checks.check_shared(model, 1)
    with pytest.raises(ValueError, match="dense.*/inputs_.*mixed_bfloat16"):
        checks.check_shared(model, 2)


def test_batch_norm_is_one_of_its_choices():
    for choice in ("average", "synchronized", "tower0"):
        checks.check_batch_norm(choice)
    with pytest.raises(ValueError, match=r"batch_norm \('mean'\) must be one of average, "):
        checks.check_batch_norm("mean")


def test_nonfinite_is_one_of_its_choices():
    checks.check_nonfinite("skip")
    with pytest.raises(ValueError, match=r"nonfinite \('raise'\) must be one of apply, stop, skip"):
        checks.check_nonfinite("raise")
