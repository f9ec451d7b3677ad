"""Where a step's time goes: steps made of pauses, and one real run."""

import io
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from tests.app import run_test
from towers.app.datasets.batches import load_examples
from towers.app.diagnosis import profile
from towers.app.diagnosis.profile import GRADIENTS, Profile, UPDATE, WAITING
from towers.app.reporting.report import Report
from towers.app.training.build import build
from towers.machine.devices import CPU


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, value in (("_ROUNDS", 2), ("_WARM_UP_SECONDS", 0.0), ("_SECONDS", 0.05)):
        monkeypatch.setattr(profile, name, value)


class Pauses:
    """Takes seconds for the gradients of an example, and for an update."""

    policy = CPU

    def __init__(self, of_example, of_update, most=100):
        self.of_example, self.of_update, self.most = of_example, of_update, most

    def gradients(self, x, y=None, weights=None):
        if len(x) > self.most:
            raise tf.errors.ResourceExhaustedError(None, None, "memory")
        time.sleep(len(x) * self.of_example)

    def train_batch(self, x, y=None, sample_weight=None, placed=None):
        self.gradients(x)
        time.sleep(self.of_update)


def measured(tmp_path, step, of_input, num_examples=100):
    """Of a global batch of 8, each read in so many seconds."""

    def batches(size):
        while True:
            yield np.zeros([size, 1])
            time.sleep(of_input)

    return profile.measure(step, batches, 8, num_examples, tmp_path)


def test_each_part_has_its_time_and_they_add_up_to_the_step(tmp_path):
    found = measured(tmp_path, Pauses(0.03 / 8, 0.02), of_input=0.08)
    expected = {WAITING: 0.08, GRADIENTS: 0.03, UPDATE: 0.02}
    assert found.parts == pytest.approx(expected, abs=0.015)
    assert sum(found.parts.values()) == pytest.approx(found.whole)
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_what_more_gpus_and_a_larger_batch_would_bring_as_computed_by_hand():
    found = Profile(8, 0.10, 0.01, 0.10, {4: 0.05, 8: 0.08, 16: 0.14})
    assert found.speedup(0.5, 1) == pytest.approx(0.10 / 0.07)
    assert found.speedup(2, 2) == pytest.approx(2 * 0.10 / 0.16)
    by_input = found._replace(input=0.10)
    assert by_input.speedup(0.5, 1) == by_input.speedup(2, 2) == 1


@pytest.mark.parametrize("most, num_examples", [(8, 100), (100, 15)])
def test_a_batch_too_large_for_the_memory_or_the_data_is_left_out(most, num_examples, tmp_path):
    found = measured(tmp_path, Pauses(1e-4, 1e-4, most), 0.0, num_examples)
    assert list(found.gradients) == [4, 8]
    assert found.speedup(2, 2) is None


GPUS, CPUS = (SimpleNamespace(devices=[name]) for name in ("/gpu:0", "/cpu:0"))


@pytest.mark.parametrize(
    "step, seconds, words",
    [
        (GPUS, (0.9, 0.1, 0.05), ["waiting for input, 89%", "--data_workers", "at most 1.0 times"]),
        (CPUS, (0.1, 1.0, 0.9), ["a GPU", "share the cores", "--num_towers="]),
        (GPUS, (0.1, 1.0, 0.2), ["update, 80%", "--variable_device=gpu", "1.1 times", "1.7 times"]),
    ],
)
def test_the_longest_part_is_named_with_what_to_change(step, seconds, words, tmp_path):
    read, alone, gradients = seconds
    found = Profile(
        8,
        max(read, alone),
        read,
        alone,
        {
            4: gradients / 2,
            8: gradients,
            16: 2 * gradients,
        },
    )
    text = "\n".join(map(str, profile.report(found, step, tmp_path)))
    assert [word for word in words if word not in text] == [], text


@pytest.mark.parametrize(
    "noise, shown",
    [
        (0.0, ["waiting for input      <1.00    <1%", "update                 20.00    20%"]),
        (0.03, ["waiting for input     <30.00   <30%", "update                <30.00   <30%"]),
    ],
)
def test_a_part_below_the_noise_is_shown_as_less_than_it_and_never_as_0(noise, shown, tmp_path):
    found = Profile(8, 0.1, 0.01, 0.1, {8: 0.08}, noise)
    lines = profile.report(found, CPUS, tmp_path)
    assert [line.partition("  =")[0] for line in (lines[1], lines[3])] == shown
    assert lines[2].startswith("gradients              80.00    80%  ===")


def test_a_run_is_measured_and_left_as_it_was(tmp_path):
    run = build(run_test.config(device="cpu", num_towers=4))
    stream = io.StringIO()
    before = [v.numpy() for v in run.step.model.variables]
    profile.show_profile(run, tmp_path, Report(stream))
    for variable, value in zip(run.step.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value)
    assert stream.getvalue().startswith("part of a step ")


def test_batches_are_full_ones_epoch_after_epoch():
    x, y = np.arange(7, dtype=np.float32)[:, None], np.arange(7, dtype=np.int32)
    batches = profile.full_batches(load_examples((x, y)), 3, seed=0)
    assert [y.shape[0] for _, y in itertools.islice(batches, 5)] == [3] * 5
