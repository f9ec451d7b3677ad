"""--towers_per_device=auto: devices that are 2 and 3 times slower get the towers that fit them best."""

import io
import itertools
import json
from collections import Counter
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st

import towers
from tests.app import run_test
from tests.step.small_step import called_in_towers
from towers.app.diagnosis import profile
from towers.app.diagnosis.describe import describe
from towers.app.reporting.report import Report, slowest_line
from towers.app.training.build import build
from towers.app.training import device_speeds
from towers.app.training.device_speeds import best_counts
from towers.divide.tower_step import TowerStep
from towers.machine.devices import REHEARSAL

HERE = "tests.app.training.device_speeds_test"
config = partial(run_test.config, device="cpu")
NUM_TOWERS, SECONDS = 6, 0.03


@keras.saving.register_keras_serializable("device_speeds_test")
class Draws(keras.layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


def noisy(input_shape, num_classes):
    """With moving averages, a seed's state, and noise that has no state to save."""
    layers = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), Draws()
    return run_test.small_model(input_shape, num_classes, *layers)


class Pauses(keras.layers.Layer):
    def call(self, x):
        return tf.raw_ops.Snapshot(input=x)


def numbered():
    """Examples that say which they are, and with that, in order, which tower has them."""
    x = np.arange(24, dtype="float32")[:, None]
    y = np.arange(24) % 3
    return (x, y), (x, y)


def pausing(input_shape, num_classes):
    return keras.Sequential(
        [keras.Input(input_shape), Pauses(), keras.layers.Dense(3, activation="softmax")]
    )


class PlannedTime:
    """A clock that advances by what towers take on their devices, so that no load disturbs it."""

    def __init__(self):
        self.factors, self.taken = {}, Counter()  # both by device

    def perf_counter(self):
        return SECONDS + sum(self.taken.values())  # one tower at a time is measured

    def end_of_step(self):
        """Returns the seconds until the last device has computed its towers, and starts again."""
        seconds = max(self.taken.values())
        self.taken.clear()
        return seconds


@pytest.fixture
def slower(monkeypatch):
    """slower(factors): on the k-th device, a tower takes factors[k] times as long."""
    towers_on, clock = [], PlannedTime()

    def pause(rows):
        device = towers_on[int(rows[0, 0]) * len(towers_on) // 24]
        clock.taken[device] += SECONDS * clock.factors[device]
        return rows

    def noting(method):
        def run(step, *batch, **named):
            towers_on[:] = step.tower_devices
            return method(step, *batch, **named)

        return run

    def set_factors(*factors):
        clock.factors.update((f"/cpu:{k}", factor) for k, factor in enumerate(factors))
        return clock

    for name in ("gradients", "train_batch"):
        monkeypatch.setattr(TowerStep, name, noting(getattr(TowerStep, name)))
    for module in (device_speeds, profile):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setenv(REHEARSAL, "1")  # towers on one device take turns
    with called_in_towers(pause):
        yield set_factors


@given(st.integers(1, 4), st.integers(0, 8), st.data())
def test_no_other_numbers_end_earlier(num_devices, more, data):
    seconds = data.draw(st.lists(st.floats(0.01, 10), min_size=num_devices, max_size=num_devices))
    found = best_counts(num_devices + more, seconds)
    assert sum(found) == num_devices + more and min(found) >= 1
    ends = lambda counts: max(n * each for n, each in zip(counts, seconds, strict=True))  # noqa: E731
    every = itertools.product(range(1, more + 2), repeat=num_devices)
    assert ends(found) <= min(ends(n) for n in every if sum(n) == num_devices + more)


def seconds_of_step(run, counts, clock):
    step = run.make_step(towers_per_device=counts)
    (x, y), _ = numbered()
    clock.taken.clear()
    step.train_batch(x, y)["loss"].numpy()
    return clock.end_of_step()


NAMES = {"model": f"{HERE}:pausing", "dataset": f"{HERE}:numbered", "batch_size": 24}
AUTO = {"towers_per_device": "auto", "num_towers": NUM_TOWERS}


def test_a_slower_device_gets_the_number_with_the_fastest_step(slower):
    clock = slower(3, 1)
    run = build(config(**AUTO, **NAMES))
    assert run.config.towers_per_device == "1,5"
    assert [run.step.tower_devices.count(f"/cpu:{k}") for k in (0, 1)] == run.config.tower_counts
    stream = io.StringIO()
    describe(run, Report(stream), "run: here")
    (line,) = (line for line in stream.getvalue().splitlines() if line.startswith("Slowest"))
    assert line.startswith("Slowest   /cpu:0, 0.")
    seconds = [seconds_of_step(run, (n, NUM_TOWERS - n), clock) for n in (1, 2)]
    assert 0 < seconds[0] < seconds[1]


def test_the_profile_names_the_slowest_device(slower, tmp_path, monkeypatch):
    for name, value in (("_ROUNDS", 1), ("_WARM_UP_SECONDS", 0.0), ("_SECONDS", 0.0)):
        monkeypatch.setattr(profile, name, value)
    slower(1, 3)
    stream = io.StringIO()
    run = build(config(num_towers=2, **NAMES))
    profile.show_profile(run, tmp_path, Report(stream))
    assert "\nSlowest   /cpu:1, 0." in stream.getvalue()


def test_devices_that_differ_little_have_no_slowest():
    line = slowest_line({"/gpu:0": 0.100, "/gpu:1": 0.104}, ["/gpu:0", "/gpu:1"])
    assert line == "Slowest   none: a tower takes 0.104 s, and devices differ by at most 5%"
    line = slowest_line({"/gpu:0": 0.1, "/gpu:1": 0.25}, ["/gpu:0"] * 3 + ["/gpu:1"])
    text = "/gpu:1, 0.25 s a tower; fastest: /gpu:0, 0.1 s. /gpu:0 ends last, after 0.3 s"
    assert line == f"Slowest   {text}"


@pytest.mark.usefixtures("in_an_empty_directory", "without_charts")
def test_measuring_changes_no_bit_and_the_run_records_the_numbers():
    given = {"model": f"{HERE}:noisy", "max_steps": 3, "cpu_threads": 1}
    digests = set()
    for name, values in (("even", {"num_towers": NUM_TOWERS}), ("auto", AUTO)):
        towers.train(config(run_dir=name, **given, **values))
        digests.add(towers.digest(keras.saving.load_model(f"{name}/final.keras")))
    assert len(digests) == 1
    with open("auto/config.json", encoding="utf-8") as file:
        counts = json.load(file)["towers_per_device"].split(",")
    assert sum(map(int, counts)) == NUM_TOWERS and len(counts) == 2


@pytest.mark.parametrize(
    "values, error",
    [
        ({}, "^towers_per_device=auto gives .* each of the 2 devices has only one.*num_towers=8"),
        ({"accumulate": 2}, "accumulate .2. and towers_per_device .auto. both say how many"),
    ],
)
def test_auto_needs_more_towers_than_devices(values, error):
    with pytest.raises(ValueError, match=error):
        build(config(towers_per_device="auto", **values))


def test_one_device_gets_all_towers_and_no_number():
    run = build(config(num_gpus=1, **AUTO))
    assert (run.config.towers_per_device, run.tower_seconds) == (None, {})
