"""A script that names no device trains on a GPU machine as it does on any other.

There, all that is made outside of `tf.device` lies on GPU 0: another default device stands for it.
The models are made under `tf.device("/cpu:0")`, as the examples have it, or at the default, too.
At last, the traced graph: variables, towers and the update are where the diagram says.
"""

import re
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.bits import bits
from tests.parallel.fits import rows
from tests.step.small_step import partition_graphs
from towers.machine.devices import REHEARSAL

C, L = keras.callbacks, keras.layers
Adam, SGD = keras.optimizers.Adam, keras.optimizers.SGD
ELSEWHERE, GPUS, DEVICES, TOWERS = "/cpu:3", [1, 2], ["/cpu:1", "/cpu:2"], 3
LOSS = "sparse_categorical_crossentropy"


def default_device(device):
    return tf.device(device) if device else nullcontext()


# What scripts make.


def model():
    with tf.device("/cpu:0"):
        return keras.Sequential(
            [
                keras.Input((6,)),
                L.Dense(5, activation="tanh"),
                L.BatchNormalization(),
                L.Dropout(0.3, seed=1),
                L.Dense(3, activation="softmax"),
            ]
        )


def unbuilt():
    return keras.Sequential([L.Dropout(0.3, seed=1), L.Dense(5), L.Dense(3, "softmax")])


def with_layers_from_outside():
    """The state of a layer's seeds is made with the layer, its weights are not."""
    layers = [L.Dropout(0.3, seed=1), L.Dense(5), L.GaussianNoise(0.1, seed=1), L.Dense(3)]
    with tf.device("/cpu:0"):
        return keras.Sequential([keras.Input((6,)), *layers, L.Softmax()])


def on_two_devices():
    with tf.device("/cpu:0"):
        first = keras.Sequential([keras.Input((6,)), L.Dense(5, activation="tanh")])
    return keras.Sequential([first, L.Dense(3, activation="softmax")])


def built(made):
    optimizer = Adam(0.01, use_ema=True, ema_overwrite_frequency=3)
    optimizer.build(made.trainable_variables)
    return optimizer


def of_a_variable(_):
    """TensorFlow's own, which no optimizer knows."""
    rate = tf.Variable(0.05)
    return Adam(lambda: rate, gradient_accumulation_steps=2)


class Halved(C.Callback):
    """Assigns the learning rate, both ways."""

    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate = 0.9 * self.model.optimizer.learning_rate

    def on_epoch_end(self, epoch, logs=None):
        self.model.optimizer.learning_rate.assign(0.5 * self.model.optimizer.learning_rate)


# By the name of a case: its policy, whether that of GPUs, and what `fitted` takes.
FITS = {
    "a built optimizer that averages, and a learning rate that changes": (
        False,
        {
            "optimizer": built,
            "validation_split": 0.2,
            "callbacks": lambda: [
                Halved(),
                C.ReduceLROnPlateau("loss", 0.3, 0),
                C.SwapEMAWeights(swap_on_epoch=True),
            ],
        },
    ),
    "a loss scale on GPUs": (
        True,
        {
            "optimizer": lambda _: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.Nadam(0.01), dynamic_growth_steps=2
            )
        },
    ),
    "an unbuilt model and a schedule on GPUs": (
        True,
        {
            "make": unbuilt,
            "optimizer": lambda _: SGD(
                keras.optimizers.schedules.CosineDecay(0.1, 8), momentum=0.9
            ),
        },
    ),
    "layers from outside, and slots of other shapes": (
        False,
        {"make": with_layers_from_outside, "optimizer": lambda _: keras.optimizers.Adafactor(0.01)},
    ),
}


def values(*holders):
    return [v.numpy() for holder in holders for v in holder.variables]


def fitted(
    device,
    make=model,
    optimizer=lambda _: Adam(0.01),
    callbacks=list,
    **options,
):
    """(all variables, history) of two epochs, with metrics of several kinds."""
    with default_device(device):
        keras.utils.set_random_seed(3)
        made = make()
        parallel = towers.make_parallel(made, GPUS, num_towers=TOWERS)
        parallel.compile(
            optimizer(made),
            "categorical_crossentropy",
            metrics=[keras.metrics.F1Score("macro"), "accuracy"],
        )
        history = parallel.fit(
            rows()[0],
            np.eye(3, dtype="float32")[rows()[1]],
            batch_size=7,
            epochs=2,
            verbose=0,
            callbacks=callbacks(),
            **options,
        ).history
        return values(made, parallel.optimizer), history


def assert_same_bits(here, there):
    assert [bits(v) for v in here[0]] == [bits(v) for v in there[0]]
    assert here[1:] == there[1:]


@pytest.mark.matrix
@pytest.mark.parametrize("name", FITS)
def test_a_fit_ends_in_the_same_bits_wherever_its_parts_were_made(name, monkeypatch):
    on_gpus, options = FITS[name]
    monkeypatch.setenv(REHEARSAL, str(int(on_gpus)))
    assert_same_bits(*(fitted(device, **options) for device in (None, ELSEWHERE)))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "options",
    [
        {"make": on_two_devices, "optimizer": FITS["a loss scale on GPUs"][1]["optimizer"]},
        {"optimizer": of_a_variable},
    ],
    ids=["parameters", "learning rate"],
)
def test_what_no_program_of_one_device_can_update_is_updated_by_plain_tensorflow(options, float64):
    """With other bits than XLA's."""
    here, there = (fitted(device, **options)[0] for device in (None, ELSEWHERE))
    for a, b in zip(here, there, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_a_tower_step_ends_in_the_same_bits():
    """An optimizer of many variables; entry_points_test runs a fit on another default device."""

    def stepped(device):
        with default_device(device):
            keras.utils.set_random_seed(3)
            step = towers.TowerStep(
                model(),
                Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.1),
                LOSS,
                metrics=[keras.metrics.SparseCategoricalAccuracy()],
                devices=DEVICES,
                num_towers=TOWERS,
                nonfinite="skip",
                batch_norm="average",
            )
            x, y = rows()
            step(x[:7], y[:7])
            step(np.full_like(x, np.nan), y)
            step(x[7:], y[7:])
            logs = step(x[14:], y[14:])
            assert int(step.optimizer.iterations) == 1  # of three; with that of NaN it would be 2
            _, gradients = step.gradients(x, y)
            return (
                [*values(step.model, step.optimizer), *(g.numpy() for g in gradients)],
                {name: float(value) for name, value in logs.items()},
            )

    assert_same_bits(stepped(None), stepped(ELSEWHERE))


def cpu_index(operation):
    return int(re.search(r"CPU:(\d+)", operation.device).group(1))


@pytest.mark.telling("5-2")
@pytest.mark.parametrize("num_towers, num_devices", [(8, 4), (3, 2), (5, 2)])
def test_tower_t_runs_on_device_t_times_D_over_T_and_the_update_on_cpu_0(num_towers, num_devices):
    """Parameters are sent once to each device, not once to each tower."""
    steps = []

    def train():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                L.Conv2D(4, 3),
                L.BatchNormalization(),
                L.Flatten(),
                L.Dense(2),
            ]
        )
        steps.append(
            towers.TowerStep(
                model,
                "adam",
                "mse",
                num_towers=num_towers,
                batch_norm="average",
                devices=towers.tower_devices(num_devices, "cpu"),
            )
        )
        steps[0](np.ones((9, 8, 8, 1), "float32"), np.ones((9, 2), "float32"))

    partitions = [g for g in partition_graphs(train) if any("CPU:1" in n.device for n in g.node)]
    (step,) = steps
    (graph,) = step.traces
    calls = [op for op in graph.graph.get_operations() if "PartitionedCall" in op.type]
    found = [cpu_index(op) for op in calls if "_tower_" in op.get_attr("f").name]
    assert found == [t * num_devices // num_towers for t in range(num_towers)]
    for variable in [*step.model.variables, *step.optimizer.variables]:
        assert variable.value.device.endswith("CPU:0"), variable.path
    received = [
        n.attr["tensor_name"].s.decode()
        for graph in partitions
        for n in graph.node
        if n.op == "_Recv" and b"ReadVariableOp" in n.attr["tensor_name"].s
    ]
    assert received
    assert len(received) == len(set(received))
    assert len(received) <= len(step.model.variables) + len(step.optimizer.variables)
