"""A model's state: what goes into each tower, and how the towers' new states become one."""

import keras
import pytest
import tensorflow as tf

from towers.step import state

L = keras.layers


def model_with_state():
    """Non-trainable: a seed; a nested model's seed and statistics; frozen weights; statistics."""
    inner = keras.Sequential(
        [keras.Input((4,)), L.Dropout(0.5, seed=1, name="inner_dropout"),
         L.BatchNormalization(name="inner_norm")]
    )
    frozen = L.Dense(4, trainable=False, name="frozen")
    return keras.Sequential([
        keras.Input((4,)), L.GaussianNoise(0.1, seed=2, name="noise"), inner, frozen,
        L.BatchNormalization(name="norm"), L.Dense(1),
    ])


def paths(model, indices):
    """"layer/variable" of some non-trainable variables."""
    found = [model.non_trainable_variables[i].path for i in indices]
    return ["/".join(path.split("/")[-2:]) for path in found]


def test_seeds_are_found_in_layers_of_nested_models_too():
    model = model_with_state()
    found = [model.non_trainable_variables[i] for i in state.seed_indices(model)]
    assert len(found) == 2
    assert all(v.path.endswith("seed_generator_state") and v.shape == (2,) for v in found)


def test_statistics_are_those_of_batch_normalization_alone():
    model = model_with_state()
    assert paths(model, state.batch_norm_indices(model)) == [
        "inner_norm/moving_mean", "inner_norm/moving_variance",
        "norm/moving_mean", "norm/moving_variance",
    ]


def test_statistics_of_synchronized_layers_are_left_out():
    model = model_with_state()
    indices = state.batch_norm_indices(model, [model.get_layer("norm")])
    assert paths(model, indices) == ["inner_norm/moving_mean", "inner_norm/moving_variance"]


def test_the_weights_of_a_frozen_batch_normalization_are_no_statistics():
    model = keras.Sequential([keras.Input((4,)), L.BatchNormalization(name="norm"), L.Dense(1)])
    model.layers[0].trainable = False
    assert paths(model, state.batch_norm_indices(model)) == [
        f"norm/{name}" for name in ("moving_mean", "moving_variance")
    ]


def test_tower_0_starts_as_keras_would_and_others_from_seeds_of_their_own():
    seed, other = tf.constant([7, 40], tf.int64), tf.constant([1.5, 2.5])
    towers = [state.tower_state([other, seed], [1], t) for t in range(8)]
    assert towers[0][1] is seed
    assert all(tower[0] is other for tower in towers)
    seeds = {tuple(tower[1].numpy()) for tower in towers}
    assert len(seeds) == 8
    assert {tower[1].dtype for tower in towers} == {tf.int64}


def test_a_towers_seed_depends_on_the_seed_and_on_its_index_alone():
    def of(seed, tower):
        return state.tower_state([tf.constant(seed, tf.int64)], [0], tower)[0].numpy().tolist()

    assert of([7, 40], 3) == of([7, 40], 3)
    assert of([7, 40], 3) != of([8, 40], 3)  # another run
    assert of([7, 40], 3) != of([7, 41], 3)  # another step


def small_model():
    model = keras.Sequential([keras.Input((2,)), L.BatchNormalization(), L.Dropout(0.5, seed=1)])
    mean, variance, seed = model.non_trainable_variables
    return model, mean, variance, seed


def test_values_are_assigned_or_added_and_none_leaves_a_variable_as_it_is():
    model, mean, variance, seed = small_model()
    before = seed.numpy().tolist()
    state.assign(model.non_trainable_variables, [tf.constant([1.0, 2.0]), None, None])
    state.assign_add(model.non_trainable_variables, [tf.ones([2]), tf.ones([2]), None])
    assert [v.numpy().tolist() for v in (mean, variance, seed)] == [[2, 3], [2, 2], before]


def test_a_built_model_is_accepted_and_an_unbuilt_one_is_told_how_to_be_built():
    state.check_model(model_with_state())
    with pytest.raises(ValueError, match="'late' is not built.*keras.Input, or call it"):
        state.check_model(keras.Sequential([L.Dense(1)], name="late"))


def test_a_stateful_recurrent_layer_is_refused_by_its_name_also_inside_a_wrapper():
    layer = L.GRU(1, stateful=True, name="remembers")
    model = keras.Sequential([keras.Input((5, 6), batch_size=4), L.Bidirectional(layer)])
    with pytest.raises(ValueError, match="remembers.* is stateful=True"):
        state.check_model(model)
    state.check_model(keras.Sequential([keras.Input((5, 6)), L.GRU(1)]))


def test_batch_norm_is_one_of_its_choices():
    for choice in ("average", "synchronized", "tower0"):
        state.check_batch_norm(choice)
    with pytest.raises(ValueError, match=r"batch_norm \('mean'\) must be one of average, "):
        state.check_batch_norm("mean")


@pytest.mark.parametrize("device", ["/cpu:0", "/cpu:3"])
def test_the_variables_device_is_where_they_were_made(device):
    with tf.device(device):
        model = keras.Sequential([keras.Input((2,)), L.Dense(1)])
    assert state.variables_device(model) == device


def test_the_variables_device_is_the_parameters_wherever_seeds_and_statistics_are():
    layers = [L.Dropout(0.5), L.BatchNormalization(center=False, scale=False), L.Dense(1)]
    layers[1].build((None, 2))
    with tf.device("/cpu:3"):
        model = keras.Sequential([keras.Input((2,)), *layers])
        assert state.variables_device(model) == "/cpu:3"
    model.trainable = False
    assert state.variables_device(model) == "/cpu:0"


def test_a_model_without_variables_is_at_home_on_the_cpu():
    assert state.variables_device(keras.Sequential([keras.Input((2,)), L.Flatten()])) == "/cpu:0"
