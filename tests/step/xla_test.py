"""XLA compiles towers as Keras does, and on a CPU the small loops that it makes faster."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.step.small_step import batch
from towers.divide import stages
from towers.divide.divided_step import DividedStep, method_of
from towers.divide.machines import Machine
from towers.step.exchange import LocalExchange
from towers.step import xla

L = keras.layers
LARGE = 4096  # XLA compiles the update of so many elements


def recurrent(*layers, steps=5):
    return keras.Sequential(
        [
            keras.Input((steps, 3)),
            *(layers or [L.GRU(4), L.Dropout(0.5)]),
            L.Dense(1),
        ]
    )


@pytest.mark.parametrize("told, compiled", [(True, True), (False, False), ("auto", False)])
def test_towers_are_compiled_as_keras_compiles_the_model(told, compiled):
    """Without a GPU, only if it was told so."""
    model = keras.Sequential([keras.Input((6,)), L.Dense(3)])
    model.compile("sgd", "mse", jit_compile=told)
    assert towers.TowerStep(model, "sgd", "mse", devices=["/cpu:0"]).uses_xla is compiled


@pytest.mark.parametrize(
    "model, loss, pays",
    [
        (recurrent, "mse", True),
        (lambda: recurrent(L.Bidirectional(L.LSTM(4))), keras.losses.MeanSquaredError(), True),
        (lambda: recurrent(L.Masking(), L.SimpleRNN(256)), keras.losses.mean_squared_error, True),
        (
            lambda: keras.Sequential([keras.Input((5, 3)), recurrent()]),
            None,
            True,
        ),  # one in another
        (
            lambda: keras.Sequential([keras.Input((6,)), L.Dense(1)]),
            "mse",
            False,
        ),  # nothing repeats
        (lambda: recurrent(L.GRU(257)), "mse", False),
        (lambda: recurrent(L.GRU(4, unroll=True)), "mse", False),
        (lambda: recurrent(L.GRU(4, dtype="mixed_bfloat16")), "mse", False),
        (lambda: recurrent(steps=None), "mse", True),  # if a batch's length is fixed
        (lambda: recurrent(L.Conv1D(2, 2), L.GRU(4)), "mse", False),
        (lambda: recurrent(L.GRU(4), type("OwnLayer", (L.Dense,), {})(1)), "mse", False),
        (recurrent, lambda y, y_pred: keras.losses.mean_squared_error(y, y_pred), False),
    ],
)
def test_small_loops_of_keras_own_layers_are_compiled_on_a_cpu(model, loss, pays):
    made = model()
    made.compile("sgd", loss)
    found = xla.uses_xla(made, ["/cpu:0"], "auto")
    assert found == (xla.FIXED_SHAPES if pays else False)


class Seen(Exception):
    """What a test wants to know is known: it needs no more of a step."""


@pytest.mark.parametrize("fixed", [True, False])
def test_small_loops_are_compiled_if_all_batches_have_one_length(fixed, monkeypatch):
    def chosen(*arguments):
        raise Seen

    monkeypatch.setattr(stages, "chosen", chosen)
    model = towers.make_parallel(recurrent(steps=None), 2)
    model.compile("sgd", "mse")
    rows = tf.data.Dataset.from_tensors((np.ones((4, 5, 3), "float32"), np.ones((4, 1), "float32")))
    if not fixed:
        specs = tf.TensorSpec([None, None, 3]), tf.TensorSpec([None, 1])
        (batch,) = rows
        rows = tf.data.Dataset.from_generator(lambda: [batch], output_signature=specs)
    with pytest.raises(Seen) if fixed else nullcontext():
        model.fit(rows, verbose=0)


@pytest.mark.parametrize(
    "size, shards, compiled",
    [
        (14, [4, 4, 3, 3], [True] * 4),
        (14, [4, 3, 2, 1], [True, True, False, False]),
        (8, [4, 4], [True] * 2),
        (8, [5, 3], [False] * 2),
        (2, [1, 1, 0, 0], [True] * 4),
        (None, [5, 0], [True] * 2),
    ],
)
def test_shards_of_a_full_batch_run_compiled(size, shards, compiled):
    assert [bool(v) for v in xla.FullBatch(size).compiled("train", shards)] == compiled


def test_a_callback_that_evaluates_keeps_the_full_batch_of_an_evaluation_around_it():
    full = xla.FullBatch()
    with full.first_of("test"):
        full.compiled("test", [tf.constant(4)])
        with full.first_of("test"):
            full.compiled("test", [tf.constant(7)])
        assert int(full.sizes["test"]) == 4
    assert int(full.sizes["test"]) == full.EVERY


def test_xla_does_not_depend_on_whether_a_model_is_compiled_before_make_parallel(monkeypatch):
    """Keras stores False for "auto" here, and for False: only a later compile can say that."""
    made = []

    def uses(model, devices, jit_compile, **options):
        made.append(xla.uses_xla(model, devices, jit_compile, **options))
        raise Seen

    model = recurrent()
    model.compile("sgd", "mse")
    step = towers.TowerStep(model, "sgd", "mse", devices=["/cpu:0"])
    assert step.uses_xla == xla.FIXED_SHAPES
    monkeypatch.setattr("towers.parallel.model_state.uses_xla", uses)
    x, y = np.ones((4, 5, 3), "float32"), np.ones((4, 1), "float32")
    for told in (None, {}, {"jit_compile": True}, {"jit_compile": False}):
        parallel = towers.make_parallel(model, 2)
        if told is not None:
            parallel.compile("sgd", "mse", **told)
        for each in (parallel, towers.make_parallel(parallel, 2)):
            with pytest.raises(Seen):
                each.fit(x, y, verbose=0)
    auto = xla.FIXED_SHAPES
    assert made == [auto, auto, auto, auto, True, True, False, False]


@pytest.mark.parametrize("jit_compile, is_kept", [("auto", False), (False, True)])
def test_only_without_xla_an_update_keeps_a_nan(jit_compile, is_kept):
    """XLA's maximum of a number and NaN is the number, TensorFlow's is NaN."""
    x, y = np.full((4, 2), np.nan, "float32"), np.zeros((4, LARGE), "float32")
    optimizers = []
    for parallel in (False, True):
        model = keras.Sequential([keras.Input((2,)), L.Dense(LARGE)])
        optimizers.append(keras.optimizers.Adam(amsgrad=True))
        if parallel:
            model = towers.make_parallel(model, 2)
            model.compile(optimizers[-1], "mse", jit_compile=jit_compile)
            model.train_on_batch(x, y)
        else:
            step = towers.TowerStep(
                model, optimizers[-1], "mse", jit_compile=jit_compile, num_towers=2
            )
            step(x, y)
    for optimizer in optimizers:
        found = [v.numpy() for v in optimizer.variables if v.path.endswith("kernel_velocity_hat")]
        assert np.isnan(found).all() == is_kept


def test_loops_have_the_same_bits_on_any_devices_and_the_results_of_keras():
    """Also their noise, which XLA would draw by another generator; of one size, to compile once."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 6, 5, 3)), rng.normal(size=(2, 6, 1))
    found = []
    for num_devices in (1, 2, None):
        keras.utils.set_random_seed(0)
        with tf.device("/cpu:0"):
            loop = L.SimpleRNN(4, dropout=0.3, recurrent_dropout=0.2)
            model = recurrent(L.Masking(), loop, L.Dropout(0.4))
        if num_devices is None:
            model.compile("sgd", "mse", run_eagerly=True)
            for rows, labels in zip(x, y, strict=True):
                model.train_on_batch(rows, labels)
        else:
            step = towers.TowerStep(
                model, "sgd", "mse", num_towers=2, devices=[f"/cpu:{i}" for i in range(num_devices)]
            )
            for rows, labels in zip(x, y, strict=True):
                step(rows, labels)
        found.append(np.concatenate([v.numpy().ravel() for v in model.trainable_variables]))
    assert found[0].tobytes() == found[1].tobytes()
    np.testing.assert_allclose(found[0], found[2], rtol=1e-5, atol=1e-6)


def test_compiled_towers_give_the_large_batch_gradient(float64):
    """Without dropout, whose random numbers XLA draws by another generator if it is asked for."""
    found = []
    for num_towers in (4, 1):
        keras.utils.set_random_seed(0)
        model = keras.Sequential(
            [
                keras.Input((6,)),
                L.Dense(8, activation="tanh", kernel_regularizer="l2"),
                L.Dense(3, activation="softmax"),
            ]
        )
        step = towers.TowerStep(
            model,
            "sgd",
            "sparse_categorical_crossentropy",
            devices=["/cpu:0"],
            num_towers=num_towers,
            jit_compile=num_towers > 1,
        )
        found.append([step.gradients(*batch(count)) for count in (40, 3)])
    for a, b in zip(*map(tf.nest.flatten, found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-14)


def test_compiled_towers_check_what_the_cpus_kernels_check():
    """XLA would read another row of the embedding, and make the loss NaN."""
    x, y = np.arange(12).reshape(6, 2), np.arange(12).reshape(6, 2) % 3
    model = keras.Sequential(
        [keras.Input((2,), dtype="int32"), L.Embedding(12, 4), L.Dense(3, activation="softmax")]
    )
    step = towers.TowerStep(
        model,
        "sgd",
        "sparse_categorical_crossentropy",
        num_towers=2,
        devices=["/cpu:0"],
        jit_compile=True,
    )
    before = [v.numpy() for v in model.weights]
    second = np.array([[0, 0]] * 3 + [[7, 0]] * 3)
    for call, inputs, said in [
        (step.predict_batch, [x + second], r"indices\[0,0\] = 13 is"),
        (step.test_batch, [x + 1, y], r"indices\[2,1\] = 12 is"),
        (step.test_batch, [x, y - 1], "label value of -1 which is outside"),
        (step.train_batch, [x + 1, y], r"indices\[2,1\] = 12 is"),
        (step.train_batch, [x, y - 1], "label value of -1 which is outside"),
    ]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=said):
            call(*inputs)
    np.testing.assert_equal([v.numpy() for v in model.weights], before)
    assert np.isfinite(step.train_batch(x, y)["loss"])


def test_a_layer_that_xla_cannot_compile_is_named():
    """As GRU and LSTM are where a GPU's cuDNN computes them."""
    model = keras.Sequential([keras.Input((8, 8, 3)), L.RandomRotation(0.1, name="turned")])
    with pytest.raises(ValueError, match="XLA cannot compile layer 'turned', a RandomRotation"):
        towers.TowerStep(model, "sgd", "mse", devices=["/cpu:0"], jit_compile=True)


class Noting(LocalExchange):
    """Notes the shapes of what several workers would exchange."""

    is_alone = False

    def __init__(self, num_towers):
        super().__init__(num_towers)
        self.parts, self.rows = [], []

    def reduce(self, values, *more):
        self.parts += [value.shape for of_tower in values for value in of_tower]
        return super().reduce(values, *more)

    def concat(self, values):
        self.rows.append([value.shape.as_list() for value in values])
        return super().concat(values)


def test_workers_know_the_shapes_of_what_xla_compiles():
    """A worker that knew less of a shape than another one would wait for it forever."""
    model, exchange = recurrent(), Noting(2)
    model.compile("sgd", "mse")
    machine = Machine(["/cpu:0"] * 2, exchange, full_batch=lambda sizes: [n == 2 for n in sizes])
    x, y = tf.zeros([4, 5, 3]), tf.zeros([4, 1])
    for name, data in (("train_step", (x, y)), ("predict_step", (x,))):
        DividedStep(method_of(model, name), machine, model=model).run(data, None)
    assert exchange.parts and all(shape.is_fully_defined() for shape in exchange.parts)
    assert exchange.rows == [[[None, 1], [None, 1]]]
