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


def paths(variables):
    """"layer/variable" of some variables."""
    return ["/".join(variable.path.split("/")[-2:]) for variable in variables]


def test_seeds_are_found_by_the_name_that_keras_gives_them():
    model = model_with_state()
    found = [v for v in model.variables if state.is_seed(v)]
    assert set(map(id, found)) == set(map(id, model.variables)) - set(map(id, model.weights))
    assert len(found) == 2 and state.is_seed(keras.random.SeedGenerator(1).state)


def test_statistics_are_those_of_batch_normalization_alone():
    model = model_with_state()
    assert paths(state.statistics(model)) == [
        "inner_norm/moving_mean", "inner_norm/moving_variance",
        "norm/moving_mean", "norm/moving_variance",
    ]


def test_statistics_of_synchronized_layers_are_left_out():
    model = model_with_state()
    found = state.statistics(model, [model.get_layer("norm")])
    assert paths(found) == ["inner_norm/moving_mean", "inner_norm/moving_variance"]


def test_a_frozen_batch_normalization_is_state_as_a_whole():
    model = keras.Sequential([keras.Input((4,)), L.BatchNormalization(name="norm"), L.Dense(1)])
    model.layers[0].trainable = False
    assert paths(state.statistics(model)) == [
        f"norm/{name}" for name in ("gamma", "beta", "moving_mean", "moving_variance")
    ]


class CountsSteps(L.BatchNormalization):
    def build(self, shape):
        super().build(shape)
        self.steps = self.add_weight((), "zeros", "int32", name="steps", trainable=False)


def test_what_a_batch_normalization_counts_is_no_statistic():
    model = keras.Sequential([keras.Input((4,)), CountsSteps(name="norm")])
    assert paths(state.statistics(model)) == ["norm/moving_mean", "norm/moving_variance"]


def test_tower_0_starts_as_keras_would_and_others_from_seeds_of_their_own():
    seed = tf.constant([7, 40], tf.int64)
    towers = [state.tower_seeds([seed], t) for t in range(8)]
    assert towers[0][0] is seed
    assert len({tuple(tower[0].numpy()) for tower in towers}) == 8
    assert {tower[0].dtype for tower in towers} == {tf.int64}


def test_a_towers_seed_depends_on_the_seed_and_on_its_index_alone():
    def of(seed, tower):
        return state.tower_seeds([tf.constant(seed, tf.int64)], tower)[0].numpy().tolist()

    assert of([7, 40], 3) == of([7, 40], 3)
    assert of([7, 40], 3) != of([8, 40], 3)  # another run
    assert of([7, 40], 3) != of([7, 41], 3)  # another step


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
