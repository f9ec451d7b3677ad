"""Whole programs, divided: fit, evaluate and predict do what Keras does on one device."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.cases import BUILT_IN, ODD
from tests.conformance.steps import fit_alike
from tests.divide.drawn_programs import Block
from towers.divide.facts import SAME
from towers.parallel.model_state import towers_of
from towers.step.structures import as_tensor, map_tensors

# A warning would say that something of these models that takes time runs once.
fast = pytest.mark.filterwarnings("error::towers.machine.user_lines.TowersWarning")
L = keras.layers
ROWS = (11, 2)  # uneven shards; fewer rows than towers
CASES = {case.name: case for case in BUILT_IN + ODD}


@pytest.fixture(autouse=True)
def exact(float64):
    """Compares in float64."""


class Around(keras.Layer):
    """Calls a function of its own dense layer's rows."""

    def __init__(self, function):
        super().__init__()
        self.dense, self.function = L.Dense(4), function

    def call(self, x):
        return self.function(self.dense(x))


class Between(keras.Layer):
    """Calls a dense layer on the rows that one function makes and another one takes apart."""

    def __init__(self, before, after):
        super().__init__()
        self.dense, self.before, self.after = L.Dense(4), before, after

    def call(self, x):
        return self.after(self.dense(self.before(x)), tf.shape(x)[0])


class Sequence(keras.Layer):
    """Takes the batch for one sequence."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        if isinstance(self.layer, L.MultiHeadAttention):
            return self.layer(x[None], x[None])[0]
        return self.layer(x[None])[0]


def routed(x):
    """Sends each row to one of two experts."""
    expert = tf.cast(x[:, 0] > 0, tf.int32)
    parts = tf.dynamic_partition(x, expert, 2)
    places = tf.dynamic_partition(tf.range(tf.shape(x)[0]), expert, 2)
    return tf.dynamic_stitch(places, [tf.tanh(parts[0]), tf.square(parts[1])])


def until_all_halt(x):
    """Loops until no row is large: the number of turns depends on all rows."""
    (x,) = tf.while_loop(lambda x: tf.reduce_any(tf.abs(x) > 0.3), lambda x: (x / 2,), (x,))
    return x


def deviation_of_batch(x):
    """The standard deviation of a batch as one more feature, as in progressive growing of GANs."""
    deviation = tf.reduce_mean(tf.sqrt(tf.math.reduce_variance(x, 0) + 1e-8))
    return tf.concat([x, tf.fill([tf.shape(x)[0], 1], deviation)], 1)


def reversed_rows(x):
    """Reverses the first two rows."""
    lengths = tf.fill([4], tf.minimum(tf.shape(x)[0], 2))
    return tf.reverse_sequence(x, lengths, seq_axis=0, batch_axis=1)


def response_over_rows(x):
    """Normalizes each feature by the same feature of other rows."""
    rows_last = tf.cast(tf.transpose(x)[None, None], tf.float32)
    return tf.cast(tf.transpose(tf.nn.lrn(rows_last)[0, 0]), x.dtype)


def padded(x):
    """Adds rows of zeros, up to a multiple of four rows."""
    count = tf.shape(x)[0]
    return tf.pad(x, [[0, (count + 3) // 4 * 4 - count], [0, 0]])


LAYERS = {  # by what they do
    "attention over rows": lambda: Sequence(L.MultiHeadAttention(2, 3)),
    "gru over rows": lambda: Sequence(L.GRU(4, return_sequences=True)),
    "convolution over rows": lambda: Sequence(L.Conv1D(4, 3, padding="same")),
    "reversed": lambda: Around(reversed_rows),
    "response over rows": lambda: Around(response_over_rows),
    "routed": lambda: Around(routed),
    "mapped": lambda: Around(lambda x: tf.vectorized_map(lambda row: row / tf.reduce_max(row), x)),
    "until all halt": lambda: Around(until_all_halt),
    "deviation": lambda: Around(deviation_of_batch),
    "padded": lambda: Between(padded, lambda y, count: y[:count]),
    "joined": lambda: Between(lambda x: tf.concat([x, x * x], 0), lambda y, n: y[:n] - y[n:]),
    "normalized": L.BatchNormalization,
    "dropped": lambda: L.Dropout(0.4, seed=3),
    "noisy": lambda: L.GaussianNoise(0.2, seed=3),
    **{
        name: partial(Block, name)
        for name in (
            "softmax over rows",
            "divided by the number",
            "repeated",
            "tiled",
            "scanned over rows",
            "sorted",
            "if large",
            "first five",
            "padded to eight",
            "in pairs",
        )
    },
}
AT_ONCE = 5  # layers in one model: tracing takes most of the time
GROUPS = [list(LAYERS)[i : i + AT_ONCE] for i in range(0, len(LAYERS), AT_ONCE)]


def of_layers(names):
    """Returns what builds a classifier with these layers side by side in its middle."""

    def build():
        x = keras.Input((6,))
        hidden = L.Dense(4)(x)
        joined = L.concatenate([LAYERS[name]()(hidden) for name in names])
        model = keras.Model(x, L.Dense(3, "softmax")(joined))
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    return build


def trained(build, data, num_towers, num_devices=3, jit_compile=False):
    """Everything that fit, evaluate and predict make; None: by Keras on one device."""
    keras.utils.set_random_seed(5)
    model = build()
    if num_towers:
        num_devices = min(num_towers, num_devices)
        model = towers.make_parallel(model, num_devices, num_towers=num_towers)
        # xla_test has what XLA compiles, which takes long.
        towers_of(model).jit_compile = jit_compile
    else:
        model.run_eagerly = True  # sooner than traced, to the same values
    found = []
    for n in ROWS:
        x, y, weight = map_tensors(as_tensor, data(n))
        found += tf.nest.flatten(model.train_on_batch(x, y, weight))
        found += tf.nest.flatten(model.test_on_batch(x, y, weight))
        found += tf.nest.flatten(model.predict_on_batch(x), expand_composites=True)
    found += [*model.variables, *model.optimizer.variables]
    return [np.asarray(value) for value in found], model


def assert_alike(build, data, num_towers=3, **options):
    """Trains by Keras and divided; returns the parallel model."""
    expected, _ = trained(build, data, None)
    found, model = trained(build, data, num_towers, **options)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-10, 1e-12)
    return model


def classes(n):
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, 6)), rng.integers(0, 3, n), None


@pytest.mark.telling("routed*", "joined*")
@pytest.mark.parametrize("names", GROUPS, ids=", ".join)
def test_layers_compute_what_one_device_would(names):
    assert_alike(of_layers(names), classes)


@fast
@pytest.mark.telling("8")
@pytest.mark.parametrize("num_towers", [1, 2, 5, 8])
def test_noise_and_statistics_of_the_batch_do_not_depend_on_the_number_of_towers(num_towers):
    def build():
        layers = [L.Dense(8), L.BatchNormalization(), L.Dropout(0.4), L.Dense(3, "softmax")]
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    assert_alike(build, classes, num_towers)


class Langevin(keras.optimizers.SGD):
    """Adds noise to each update, as stochastic gradient Langevin dynamics does."""

    def build(self, variables):
        super().build(variables)
        self.seeds = keras.random.SeedGenerator(3)

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        variable.assign_add(keras.random.uniform(variable.shape, -0.01, 0.01, seed=self.seeds))
        always = tf.random.stateless_truncated_normal(variable.shape, [3, 4], dtype=variable.dtype)
        variable.assign_add(0.01 * always)


@fast
def test_noise_of_an_update_that_xla_compiles_is_that_of_one_device():
    def build():
        layers = [L.Dense(800, "tanh"), L.Dense(3, "softmax")]  # large enough to be compiled
        model = keras.Sequential([keras.Input((6,)), *layers])
        model.compile(Langevin(0.1), "sparse_categorical_crossentropy")
        return model

    assert_alike(build, classes, jit_compile="auto")


@fast
@pytest.mark.telling("two_outputs_dict")
@pytest.mark.parametrize("name", CASES)
def test_a_model_of_the_conformance_computes_what_one_device_would(name):
    case = CASES[name]

    def build():
        model = case.build()
        model.compile(keras.optimizers.SGD(0.01), **case.compile)
        return model

    assert_alike(build, lambda n: case.batch(n, np.random.default_rng(n)))


@fast
def test_a_recurrent_layer_runs_in_every_tower():
    def build():
        layers = [L.Embedding(9, 4, mask_zero=True), L.Bidirectional(L.LSTM(3)), L.Dense(1)]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
        model.compile("adam", "mse")
        return model

    def data(n):
        rng = np.random.default_rng(n)
        x = rng.integers(1, 9, (n, 5)).astype("int32")
        x[:, 3:] = 0
        return x, rng.normal(size=(n, 1)), None

    model = assert_alike(build, data)
    ((_, divided),) = towers_of(model).steps["train"].traces.values()
    kinds = {op.type for op in divided.ops if op.in_towers is not None}
    assert {"While", "StatelessWhile"} <= kinds  # forward and backward
    # No list has a copy of the weights for each iteration.
    facts = {value.fact for op in divided.ops if "While" in op.type for value in op.outputs}
    assert SAME in facts
    assert not {"While", "StatelessWhile"} & {row.operation for row in divided.runs_once.rows(11)}


class RateOfLoss(keras.Model):
    """Sets its learning rate from the loss of the batch."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True)
            loss = tf.reduce_mean(losses)
        self.optimizer.learning_rate.assign(0.05 * loss)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def test_what_a_step_assigns_follows_from_the_whole_batch():
    x, y, _ = classes(25)

    def make():
        model = RateOfLoss()
        model(np.zeros((1, 6)))
        model.compile("sgd")
        return model

    fit_alike(make, x, y, num_towers=3, batch_size=11, epochs=2)
