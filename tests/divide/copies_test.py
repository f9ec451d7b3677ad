"""A copy of the parameters on every device, updated by all or by one: the bits of one set."""

import collections
import dataclasses
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.bits import bits as bits_of
from tests.step import small_step
from tests.step.small_step import dense
from towers.machine.choices import STRATEGIES
from towers.machine.devices import CPU, GPU, REHEARSAL
from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.step import exchange

L, optimizers = keras.layers, keras.optimizers
LOSS = "sparse_categorical_crossentropy"
COPYING = [name for name, strategy in STRATEGIES.items() if strategy.has_copies]


def wide():
    return [keras.Input((6,)), L.Dense(67, activation="tanh"), L.Dense(3, activation="softmax")]


class Adds(L.Layer):
    def build(self, shape):
        self.total = self.add_weight(shape=shape[1:], initializer="zeros", trainable=False)

    def call(self, x):
        self.total.assign(self.total + tf.reduce_sum(x, 0))  # also when it predicts
        return x


class Table(L.Embedding):
    """Looks numbers up; of one that is no number, it makes none."""

    def call(self, x):
        return super().call(tf.where(tf.math.is_nan(x), 0.0, x)) + (x - x)[..., None]


def odd():
    """A table, a kernel with a constraint, statistics."""
    return [
        keras.Input((6,)),
        Table(20, 70),
        L.Conv1D(66, 3, strides=3, use_bias=False),
        L.BatchNormalization(),
        Adds(),
        L.Flatten(),
        L.Dense(64, kernel_constraint="max_norm", use_bias=False),
        wide()[2],
    ]


def make_step(strategy="mirrored", num_devices=3, **options):
    options = {"num_towers": 4, "policy": GPU, "optimizer": "adam", **options}
    return small_step.make_step(num_devices, strategy=strategy, **options)


def batch(count, poisoned=False):
    generator = np.random.default_rng(count)
    x = generator.integers(0, 20, (count, 6)).astype("float32")
    return np.where(poisoned, np.nan, x), generator.integers(0, 3, count)


def bits(step):
    return b"".join(map(bits_of, [*step.model.variables, *step.optimizer.variables]))


def trained(step, poisoned=False):
    logs = [step.train_batch(*batch(40)), step.train_batch(*batch(9, poisoned))]
    logs.append(step.train_batch(*batch(3)))
    return [bits(step), *(v.numpy().tobytes() for v in tf.nest.flatten(logs))]


def decaying():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return keras.optimizers.Adam(schedule, use_ema=True, weight_decay=0.1)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [{"policy": dataclasses.replace(GPU, pack_transfers=False)}, {"num_towers": 2}],
    ids=["unpacked", "with idle devices"],
)
def test_copies_have_the_bits_of_one_set_of_parameters(options):
    """4 towers share 3 devices. Some batches are partial."""
    steps = [make_step(strategy, **options) for strategy in ("parameter_server", "mirrored")]
    found = [trained(step) for step in steps]
    assert found[0] == found[1]
    assert steps[0].test_batch(*batch(7)) == steps[1].test_batch(*batch(7))


ALL = {
    "averaged": lambda: optimizers.Adam(
        0.1, use_ema=True, weight_decay=0.1, ema_overwrite_frequency=3
    ),
    "momentum": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "accumulated": lambda: optimizers.AdamW(gradient_accumulation_steps=2, clipvalue=0.01),
    "decaying": decaying,
    "RMSprop": lambda: optimizers.RMSprop(centered=True),
    **{
        kind: getattr(optimizers, kind)
        for kind in ("Adagrad", "Adadelta", "Adamax", "Nadam", "Lion")
    },
    "whole": lambda: optimizers.Adafactor(0.1),
    "clipped": lambda: optimizers.SGD(clipnorm=0.1),
    "clipped together": lambda: optimizers.Adam(global_clipnorm=0.1),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1, momentum=0.9)),
}


@functools.lru_cache(maxsize=1)
def alike(optimizer, count):
    """Steps of each strategy that have made the same updates, and all that came out of each."""
    steps = [
        make_step(
            strategy,
            devices,
            num_towers=max(4, count),
            optimizer=ALL[optimizer](),
            layers=odd,
            nonfinite="skip",
        )
        for strategy, devices in [("parameter_server", 1), *((name, count) for name in COPYING)]
    ]
    return steps, [trained(step, poisoned=True) for step in steps]


@pytest.mark.telling("averaged-3")
@pytest.mark.parametrize("count", [2, 3, 8])
@pytest.mark.parametrize("optimizer", ALL)
def test_copies_and_slices_have_the_bits_of_one_device(optimizer, count):
    """Some batches are partial; the update of one that makes a loss NaN is left out."""
    (_, *steps), (expected, *others) = alike(optimizer, count)
    for name, found in zip(COPYING, others, strict=True):
        assert found == expected, name
    if optimizer == "averaged":
        step = steps[COPYING.index("sharded")]
        used = {v.value.device for v in step.optimizer.variables}
        assert len(used) == min(count, len(step.trainable_variables))


def test_each_device_updates_what_it_copies_or_owns():
    """The graph: how many variables are assigned to on the second and third device."""

    def assigned(strategy):
        optimizer = optimizers.SGD(0.1, momentum=0.9)
        step = make_step(strategy, 3, optimizer=optimizer, layers=wide)
        step.train_batch(*batch(8))
        nodes = step.traces[0].graph.as_graph_def().node
        found = collections.Counter(n.device[-5:] for n in nodes if n.op.startswith("Assign"))
        return found["CPU:1"], found["CPU:2"]

    # 4 parameters with a momentum each, and the number of iterations
    assert assigned("mirrored") == (9, 9)
    # the second kernel, and the two biases; with what the other two devices send
    assert assigned("sharded") == (2 + 3 + 1, 2 * 2 + 2 + 1)


def test_a_checkpoint_of_one_strategy_is_read_by_another(tmp_path):
    steps, _ = alike("averaged", 3)
    steps[0].train_batch(*batch(9))
    for before, after in itertools.pairwise(steps):
        saved, new = (
            {name: variables_of(step)[name] for name in ("model", "optimizer")}
            for step in (before, after)
        )
        assign_arrays(new, copy_arrays(saved), tmp_path)
    for step in steps:
        step.train_batch(*batch(9))
    assert len({bits(step) for step in steps}) == 1


def test_the_next_call_uses_values_that_other_code_has_assigned():
    """Also the first call after the copies have been trusted for some steps."""
    steps, _ = alike("averaged", 3)
    for step in steps:
        step.strategy.trust(True)
        step.train_batch(*batch(16))
        step.strategy.trust(False)
        for variable in step.model.trainable_variables:
            variable.assign(0.5 * variable)
        step.optimizer.learning_rate = 0.5
        step.strategy.trust(True)
        step.train_batch(*batch(16))
        step.strategy.trust(False)
    assert len({bits(step) for step in steps}) == 1


def test_steps_of_several_strategies_follow_each_other():
    """Slots move to the devices of the newest step."""

    def make(strategy, count):
        devices = [f"/cpu:{i}" for i in range(count)]
        return towers.TowerStep(
            whole.model,
            whole.optimizer,
            LOSS,
            strategy=strategy,
            policy=GPU,
            devices=devices,
            num_towers=3,
        )

    found = []
    for order in (
        [("parameter_server", 1)] * 4,
        [("sharded", 2), ("sharded", 3), ("mirrored", 2), ("parameter_server", 1)],
    ):
        whole = make_step("parameter_server", 1, layers=wide, num_towers=3)
        for each in order:
            make(*each).train_batch(*batch(8))
        found.append(bits(whole))
    assert found[0] == found[1]
    before = make("sharded", 2)
    before.train_batch(*batch(8))
    make("parameter_server", 1)
    with pytest.raises(tf.errors.OpError):
        before.train_batch(*batch(8))  # it would update slots that no one reads


def test_devices_that_share_a_memory_need_no_copies_and_a_warning_says_so():
    with pytest.warns(UserWarning, match="share one memory: the parameters stay where they are"):
        step = make_step(policy=CPU)
    assert step.strategy.num_copies == 0


@pytest.mark.parametrize(
    "act, message",
    [
        (lambda: make_step("everywhere"), "'everywhere'.* must be one of parameter_server, mirr"),
        (
            lambda: make_step("async"),
            "strategy=async: towers is synchronous.* experiments.staleness",
        ),
        (lambda: make_parallel("async"), "strategy=async: .* strategy=parameter_server"),
        (
            lambda: make_step(devices=["/cpu:1", "/cpu:2"]),
            r"is on /cpu:0, .* tf.device\('/cpu:1'\)",
        ),
    ],
)
def test_a_strategy_that_cannot_be_used_is_an_error(act, message):
    with pytest.raises(ValueError, match=message):
        act()


@pytest.mark.parametrize("strategy", COPYING)
def test_a_variable_that_an_optimizer_hides_is_read_on_the_first_device(strategy):
    class Hides(keras.optimizers.SGD):
        def build(self, variables):
            super().build(variables)
            self.hidden = [tf.Variable(0.1)]

        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, self.hidden[0])
            self.hidden[0].assign(0.9 * self.hidden[0])

    steps = [
        make_step(name, 2, optimizer=Hides(), num_towers=2, layers=wide)
        for name in ("parameter_server", strategy)
    ]
    assert trained(steps[0]) == trained(steps[1])


def make_parallel(strategy, model=None, count=4, optimizer=None):
    keras.utils.set_random_seed(0)
    with tf.device("/cpu:0"):
        model = keras.Sequential(wide()) if model is None else model
    parallel = towers.make_parallel(model, count, strategy=strategy)
    optimizer = optimizer or keras.optimizers.Adam(0.1, use_ema=True)
    parallel.compile(optimizer, LOSS, metrics=["accuracy"])
    return parallel


class Shrinks(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        variable = self.model.trainable_variables[0]
        variable.assign(0.9 * variable)


class ShrinksEachStep(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        Shrinks.on_epoch_end(self, 0)


@functools.cache
def fitted(strategy, callback):
    """(history, all variables) of a fit with a validation."""
    parallel = make_parallel(strategy, count=2)
    data = {"validation_data": batch(11), "callbacks": [callback()]}
    history = parallel.fit(*batch(23), batch_size=10, epochs=2, verbose=0, **data).history
    found = [*parallel.variables, *parallel.optimizer.variables]
    return history, [bits_of(v) for v in found]


@pytest.mark.telling("SwapEMAWeights-sharded")
@pytest.mark.parametrize("strategy", COPYING)
@pytest.mark.parametrize(
    "callback",
    [
        Shrinks,
        ShrinksEachStep,
        functools.partial(keras.callbacks.SwapEMAWeights, swap_on_epoch=True),
    ],
    ids=["epochs", "steps", "SwapEMAWeights"],
)
def test_a_fit_uses_the_values_that_callbacks_assign(callback, strategy, monkeypatch, recwarn):
    """SwapEMAWeights assigns past Keras' variables, before and after each evaluation."""
    monkeypatch.setenv(REHEARSAL, "1")
    assert fitted(strategy, callback) == fitted("parameter_server", callback)
    warned = [str(w.message) for w in recwarn if "strategy=mirrored" in str(w.message)]
    assert len(set(warned)) == (callback is ShrinksEachStep)
    if warned:
        assert "ShrinksEachStep may assign" in warned[0] and "each of 1 devices" in warned[0]


class Centered(L.SimpleRNNCell):
    """Subtracts the mean over the rows, so that its loop runs once."""

    def call(self, x, states, training=False):
        output, _ = super().call(x, states)
        output -= keras.ops.mean(output, 0, keepdims=True)
        return output, [output]


class Averages(keras.Sequential):
    """Keeps a moving average of its first kernel, which is read after the update."""

    def __init__(self, layers):
        super().__init__(layers)
        self.average = keras.Variable(self.trainable_variables[0], trainable=False)

    def train_step(self, data):
        logs = super().train_step(data)
        self.average.assign(0.9 * self.average + 0.1 * self.trainable_variables[0])
        return logs


def centered():
    return [keras.Input((6,)), L.Reshape((3, 2)), L.RNN(Centered(4)), wide()[2]]


def spectral():
    return [keras.Input((6,)), L.SpectralNormalization(L.Dense(8)), wide()[2]]


@pytest.mark.telling("loop that runs once")
@pytest.mark.parametrize(
    "make, layers, optimizer",
    [
        (keras.Sequential, centered, optimizers.SGD),
        (keras.Sequential, spectral, optimizers.SGD),
        (Averages, dense, ALL["Adadelta"]),
    ],
    ids=["loop that runs once", "kernel assigned by a layer", "average"],
)
def test_what_several_devices_update_may_be_read_in_the_same_step(
    make, layers, optimizer, monkeypatch
):
    """Also Adadelta's slots, which its update changes and then reads."""
    monkeypatch.setenv(REHEARSAL, "1")
    found = []
    for strategy in ("parameter_server", *COPYING):
        keras.utils.set_random_seed(0)
        parallel = make_parallel(strategy, make(layers()), 2, optimizer(0.1))
        for count in (9, 3):
            parallel.train_on_batch(*batch(count))
        found.append([bits_of(v) for v in (*parallel.variables, *parallel.optimizer.variables)])
    assert all(bits == found[0] for bits in found)


def test_several_workers_refuse_a_step_that_reads_what_another_device_updates(monkeypatch):
    """They would meet more often than a worker with one device."""
    monkeypatch.setenv(REHEARSAL, "1")
    monkeypatch.setattr(exchange.LocalExchange, "is_alone", False)
    parallel = make_parallel("sharded", Averages(dense()), 2)
    with pytest.raises(ValueError, match="reads what another device updates.* or one worker"):
        parallel.train_on_batch(*batch(9))


@pytest.mark.matrix
def test_a_model_that_builds_itself_is_built_on_the_first_device(monkeypatch):
    monkeypatch.setenv(REHEARSAL, "1")
    parallel = make_parallel("mirrored", keras.Sequential(dense()[1:]), [1, 2])
    parallel.fit(*batch(16), verbose=0)
    assert parallel.trainable_variables[0].value.device.endswith("CPU:1")
