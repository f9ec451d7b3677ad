"""A model's own train_step on towers ends where plain Keras does, for every shard split."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.own_step_cases import GAN, OWN
from tests.custom_step.steps import fit_alike

L = keras.layers
# No false alarm: what these do with the rows of a batch is a mean, a sum, or row by row.
pytestmark = pytest.mark.filterwarnings("error:.*only its own rows")

TOLERANCE = 1e-10  # relative, in float64: rounding of another order of additions
# (rows, global batch): with a ragged last batch; and with fewer rows than some tower counts.
SPLITS = [(45, 16), (22, 4)]
TOWERS = {1: SPLITS[0], 2: SPLITS[0], 3: SPLITS[0], 5: SPLITS[1], 8: SPLITS[1]}


def make(case, num_towers=None, num_devices=2):
    """The compiled model, by Keras where no towers are asked for."""
    keras.utils.set_random_seed(5)
    model = case.make()
    if num_towers is None:
        model.run_eagerly = True  # sooner than traced, to the same values
        return model
    return towers.make_parallel(model, min(num_towers, num_devices), num_towers=num_towers)


def fit(model, case, rows, batch_size):
    return model.fit(
        *case.data(rows, np.random.default_rng(rows)), batch_size=batch_size, epochs=2,
        shuffle=False, verbose=0,
    ).history


def assert_close(ours, theirs, name):
    np.testing.assert_allclose(ours, theirs, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


@pytest.mark.telling(
    "gan-(3,)", "vae-(3,)", "distillation-(3,)", "maml-(3,)", "simclr-(3,)", "sum_of_rows-(3,)",
    "clips_and_averages-(3,)", "unreduced-(3,)",
)
@pytest.mark.parametrize(
    "counts", [(3,), (1, 2, 5, 8)], ids=str
)
@pytest.mark.parametrize("case", OWN, ids=str)
def test_own_steps_train_as_keras_does(case, counts, float64):
    for rows, batch_size in {TOWERS[num_towers] for num_towers in counts}:
        theirs = make(case)
        history = fit(theirs, case, rows, batch_size)
        for num_towers in counts:
            if TOWERS[num_towers] != (rows, batch_size):
                continue
            ours = make(case, num_towers)
            trained = fit(ours, case, rows, batch_size)
            assert list(trained) == list(history)
            for name, values in history.items():
                assert_close(trained[name], values, f"{num_towers} towers: {name}")
            for a, b in zip(ours.variables, theirs.variables, strict=True):
                assert_close(a.numpy(), b.numpy(), f"{num_towers} towers: {a.path}")


class Noisy(GAN):
    """Draws its noise; dropout, BatchNormalization, means that are asked for in between."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([
            keras.Input((3,)), L.Dense(6), L.BatchNormalization(), L.Dropout(0.3, seed=1),
            L.Dense(4),
        ])
        self.seed = keras.random.SeedGenerator(7)

    def train_step(self, data):
        noise = keras.random.normal([tf.shape(data)[0], 3], seed=self.seed)
        logs = super().train_step((data, noise))
        self.d_loss.update_state(logs["d_loss"])
        return {**logs, "again": self.d_loss.result()}


class DrawsByTensorFlow(Noisy):
    """tf.random draws by seeds that stand in the graph."""

    def train_step(self, data):
        return super().train_step(data + tf.random.normal(tf.shape(data), stddev=0.1, seed=3))


def noisy_rows(count=45):
    return np.random.default_rng(1).normal(size=(count, 4)).astype("float32")


def trained_bits(cls, num_towers=None, num_devices=1):
    """All variables and logs after 2 epochs; by Keras where no towers are asked for."""
    keras.utils.set_random_seed(5)
    model = cls()
    if num_towers is not None:
        model = towers.make_parallel(model, num_devices, num_towers=num_towers)
    model.compile(jit_compile=False)
    history = model.fit(noisy_rows(), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert np.isfinite(history["d_loss"]).all()
    variables = [*model.variables, *model.d_optimizer.variables, *model.g_optimizer.variables]
    return [v.numpy().tobytes() for v in variables], history


@pytest.mark.telling("DrawsByTensorFlow-*")
@pytest.mark.parametrize("cls, devices", [(Noisy, (1, 2, 4, 8)), (DrawsByTensorFlow, (1, 8))])
def test_eight_towers_give_the_same_bits_on_any_number_of_devices(cls, devices):
    first, *others = [trained_bits(cls, 8, num_devices) for num_devices in devices]
    for other in others:
        assert other == first


def test_the_tower_count_does_change_the_bits():
    """Otherwise the test above could not fail."""
    assert trained_bits(Noisy, 2, 2) != trained_bits(Noisy, 8, 2)


def test_one_tower_is_keras_bit_for_bit():
    assert trained_bits(Noisy, 1) == trained_bits(Noisy)


class Normalized(keras.Sequential):
    """BatchNormalization in a step that is written out."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights))
        return {"loss": loss}


@pytest.mark.telling("3")
@pytest.mark.parametrize("num_towers", [1, 3, 8])
def test_synchronized_batch_norm_is_the_large_batchs_on_any_number_of_devices(num_towers, float64):
    def make():
        norm = L.BatchNormalization(synchronized=True)
        model = Normalized([
            keras.Input((4,)), L.Dense(5), norm, L.Activation("tanh"), L.Dense(2)
        ])
        model.compile("adam", jit_compile=False)
        return model

    rng = np.random.default_rng(0)
    rows = rng.normal(size=(22, 4)), rng.normal(size=(22, 2))
    fit_alike(make, *rows, num_towers=num_towers, batch_size=6, epochs=2)
