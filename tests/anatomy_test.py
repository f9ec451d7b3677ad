"""Real steps measured: additive phases, traces that open, and what is left alone."""

import gzip
import itertools
import json
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers import anatomy, phases
from towers.input import load_examples
from towers.step import TowerStep

ATTEMPTS = 8  # other processes may take the machine from one half of a measurement


def make_step(num_towers, nonfinite="apply"):
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        model = keras.Sequential([
            keras.Input((64,)),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(512, activation="relu"),
            keras.layers.Dense(4),
        ])
    devices = ["/cpu:0", "/cpu:1", "/cpu:2"][:num_towers]
    return TowerStep(
        model, "adam", "mse", devices=devices, num_towers=num_towers, nonfinite=nonfinite
    )


def make_batches(size=60):
    generator = np.random.default_rng(2)
    x, y = (tf.constant(generator.normal(size=(size, n)), tf.float32) for n in (64, 4))
    return itertools.repeat((x, y))


@pytest.mark.parametrize("num_towers", [1, 2, 3])
def test_the_phases_add_up_to_the_step_without_the_profiler(num_towers, tmp_path):
    found = anatomy.measure(make_step(num_towers), make_batches(), tmp_path, num_steps=8)
    assert list(found.seconds) == list(phases.PHASES)
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds, rel=1e-9)
    assert len(found.spans) == num_towers


def test_spans_agree_with_the_phases_whatever_is_taken_off(monkeypatch, tmp_path):
    def half(seconds, events, step_seconds):
        assert list(seconds) == list(events) == list(phases.PHASES)
        assert events["towers"] > 1 and events["host"] > 1
        return {phase: value / 2 for phase, value in seconds.items()}

    monkeypatch.setattr(phases, "unrecorded", half)
    found = anatomy.measure(make_step(1), make_batches(), tmp_path, num_steps=8)
    (span,) = found.spans
    assert span.end - span.begin == pytest.approx(found.seconds["towers"], rel=1e-6)


def test_a_step_under_the_profiler_is_about_as_long_as_one_without(tmp_path):
    step, differences = make_step(2), []
    for _ in range(ATTEMPTS):
        found = anatomy.measure(step, make_batches(), tmp_path, num_steps=24)
        differences.append(found.profiled_seconds / found.step_seconds - 1)
        if abs(differences[-1]) < 0.1:
            break
    assert min(map(abs, differences)) < 0.1, differences


@pytest.mark.parametrize("nonfinite", ["apply", "stop"])
def test_each_phase_of_a_real_step_is_seen(nonfinite, tmp_path):
    found = anatomy.measure(make_step(2, nonfinite), make_batches(), tmp_path, num_steps=8)
    assert all(seconds > 0 for seconds in found.seconds.values()), found.seconds
    assert [(span.towers, span.device) for span in found.spans] == [
        ((0, 0), "/cpu:0"), ((1, 1), "/cpu:1")
    ]
    assert all(0 < span.begin < span.end < 2 * found.step_seconds for span in found.spans)
    assert (found.batch_size, found.num_steps, found.home) == (60, 8, "/cpu:0")
    assert [row.inputs for row in found.traffic] == [0, 30 * (64 + 4) * 4]


def test_slow_input_is_found_as_such(tmp_path):
    def slow():
        for batch in make_batches():
            time.sleep(0.05)
            yield batch

    found = anatomy.measure(make_step(2), slow(), tmp_path, num_steps=4)
    assert found.seconds["input"] >= 0.04  # of 0.05, as it is scaled
    assert max(found.seconds, key=found.seconds.get) == "input"


def test_gradients_of_embeddings_have_additions_of_their_own(tmp_path):
    with tf.device("/cpu:0"):
        model = keras.Sequential([
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(7, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(4),
        ])
    step = TowerStep(model, "sgd", "mse", devices=["/cpu:0", "/cpu:1"], num_towers=2)
    batch = tf.zeros([8, 5], tf.int32), tf.zeros([8, 4])
    found = anatomy.measure(step, itertools.repeat(batch), tmp_path, num_steps=4)
    assert found.seconds["sum"] > 0
    assert found.seconds["update"] > 0


def test_tensorboard_and_chrome_get_their_traces(tmp_path):
    anatomy.measure(make_step(2), make_batches(), tmp_path, num_steps=4)
    (profile,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert profile.stat().st_size > 0
    with gzip.open(tmp_path / anatomy.CHROME_TRACE, "rt") as file:
        entries = json.load(file)["traceEvents"]
    rows = [e["args"]["name"] for e in entries if e["name"] == "thread_name"]
    assert rows[:7] == ["input", "parameters", "towers", "sum", "update", "tower 0", "tower 1"]
    assert any(e["name"] == "tower_1/PartitionedCall:PartitionedCall" for e in entries)


def test_the_step_is_the_same_as_without_measuring(tmp_path):
    """No graph is traced for it, and none changes."""
    step = make_step(2)
    batch = next(make_batches())
    step.train_batch(*batch)
    (before,) = step._graphs.functions.values()
    operations = [op.name for op in before.graph.get_operations()]
    anatomy.measure(step, itertools.repeat(batch), tmp_path, num_steps=4)
    assert list(step._graphs.functions.values()) == [before]
    assert [op.name for op in before.graph.get_operations()] == operations


def test_batches_are_full_ones_epoch_after_epoch():
    x, y = np.arange(7, dtype=np.float32)[:, None], np.arange(7, dtype=np.int32)
    batches = anatomy.full_batches(load_examples((x, y), 7), 3, seed=0)
    sizes = [y.shape[0] for _, y in itertools.islice(batches, 5)]
    assert sizes == [3] * 5
    (_, y), = itertools.islice(anatomy.full_batches(load_examples((x, y), 7), 9, seed=0), 1)
    assert sorted(y.numpy()) == list(range(7))
