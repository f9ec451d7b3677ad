"""Real steps measured: what holds whatever the machine's speed; and hand-made ones, by hand."""

import gzip
import itertools
import json
import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from towers.app.datasets.batches import load_examples
from towers.app.diagnosis import anatomy, phases
from towers.app.diagnosis.recording import HOST, Event
from towers.machine.policy import CPU
from towers.step import TowerStep

L = keras.layers


def make_step(num_towers, nonfinite="apply", layers=()):
    keras.utils.set_random_seed(1)
    with tf.device("/cpu:0"):
        model = keras.Sequential([
            keras.Input((64,)), *layers, L.Dense(512, activation="relu"),
            L.Dense(512, activation="relu"), L.Dense(4),
        ])
    devices = ["/cpu:0", "/cpu:1", "/cpu:2"][:num_towers]
    return TowerStep(
        model, "adam", "mse", devices=devices, num_towers=num_towers, nonfinite=nonfinite,
        policy=CPU,
    )


def make_batches(size=60):
    generator = np.random.default_rng(2)
    x, y = (tf.constant(generator.normal(size=(size, n)), tf.float32) for n in (64, 4))
    return itertools.repeat((x, y))


def embedding_step(optimizer):
    """Gradients that XLA does not add: they are rows of an embedding."""
    with tf.device("/cpu:0"):
        model = keras.Sequential([
            keras.Input((5,), dtype="int32"), L.Embedding(7, 3), L.Flatten(), L.Dense(4)
        ])
    step = TowerStep(model, optimizer, "mse", devices=["/cpu:0", "/cpu:1"], num_towers=2,
                     policy=CPU)
    return step, itertools.repeat((tf.zeros([8, 5], tf.int32), tf.zeros([8, 4])))


def traced_rows(directory):
    """{row of the Chrome trace: its events, by their begins}; times in microseconds."""
    with gzip.open(directory / anatomy.CHROME_TRACE, "rt") as file:
        entries = json.load(file)["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    result = {name: [] for name in rows.values()}
    for entry in sorted((e for e in entries if e["ph"] == "X"), key=lambda e: e["ts"]):
        result[rows[entry["tid"]]].append(entry)
    return result


def whole_steps(rows):
    """(begin, end) of all steps but the last, from input to input."""
    begins = [entry["ts"] for entry in rows["input"]]
    return list(itertools.pairwise(begins))


def within(entries, step, name=""):
    begin, end = step
    return [e["ts"] for e in entries if begin <= e["ts"] < end and name in e["name"]]


# Real steps


@pytest.mark.telling("3")
@pytest.mark.parametrize("num_towers", [1, 3])
def test_the_phases_add_up_to_the_step_without_the_profiler(num_towers, tmp_path):
    found = anatomy.measure(make_step(num_towers), make_batches(), tmp_path, num_steps=8)
    assert list(found.seconds) == list(phases.PHASES)
    assert sum(found.seconds.values()) == pytest.approx(found.step_seconds, rel=1e-9)
    assert min(found.seconds.values()) >= 0
    assert [(span.towers, span.device) for span in found.spans] == [
        ((t, t), f"/cpu:{t}") for t in range(num_towers)
    ]
    assert (found.batch_size, found.num_steps, found.home) == (60, 8, "/cpu:0")
    shard = 60 // num_towers * (64 + 4) * 4
    assert [row.inputs for row in found.traffic] == [0, shard, shard][:num_towers]


@pytest.mark.telling("stop")
@pytest.mark.parametrize("nonfinite", ["apply", "stop"])
def test_every_step_reads_its_parameters_then_runs_each_tower_once_then_updates(
    nonfinite, tmp_path
):
    """On a busy machine TensorFlow's profiler may lose an event: one whole record is enough."""
    step = make_step(2, nonfinite)
    for attempts_left in (2, 1, 0):
        anatomy.measure(step, make_batches(), tmp_path, num_steps=8)
        try:
            check_order(traced_rows(tmp_path))
            break
        except (AssertionError, ValueError):
            if not attempts_left:
                raise


def check_order(rows):
    events = [event for entries in rows.values() for event in entries]
    steps = whole_steps(rows)
    assert len(steps) == 1 + 2 + 1 - 1  # the first, two to measure, the last: which is not whole
    for step in steps:
        assert len(within(rows["input"], step)) == 1
        (tower_0,), (tower_1,) = within(rows["tower 0"], step), within(rows["tower 1"], step)
        (update,) = within(events, step, "update/StatefulPartitionedCall:")
        assert within(rows["update"], step)[0] <= update
        assert within(rows["parameters"], step)[0] < min(tower_0, tower_1)
        assert max(tower_0, tower_1) < update
        assert within(rows["sum"], step)  # what tower 1 sends to the parameters' device


def test_gradients_of_embeddings_have_additions_of_their_own(tmp_path):
    """Not compiled with the update, they are seen in its scope, between the towers and its end."""
    anatomy.measure(*embedding_step("sgd"), tmp_path, num_steps=4)
    rows = traced_rows(tmp_path)
    events = [event for entries in rows.values() for event in entries]
    for step in whole_steps(rows):
        additions = within(events, step, "/sum/")
        assert additions and set(additions) <= set(within(events, step, "update/"))
        begins = [*within(rows["tower 0"], step), *within(rows["tower 1"], step)]
        assert len(begins) == 2 and min(additions) > max(begins)


@pytest.fixture(scope="module", name="pause")
def _pause(tmp_path_factory):
    """Seconds that outweigh all else in a step, as this machine is today."""
    directory = tmp_path_factory.mktemp("fast")
    found = anatomy.measure(make_step(2), make_batches(), directory, num_steps=4)
    return max(0.05, 10 * found.step_seconds)


def assert_slow(found, phase):
    """Nothing else is as long as the rest together."""
    assert found.seconds[phase] > 0.5 * found.step_seconds, found.seconds


def test_slow_input_is_found_as_such(pause, tmp_path):
    def slow():
        for batch in make_batches():
            time.sleep(pause)
            yield batch

    assert_slow(anatomy.measure(make_step(2), slow(), tmp_path, num_steps=4), "input")


class Waits(L.Layer):
    """Takes as many seconds as the first number of its first row says."""

    def call(self, x):
        def wait(seconds):
            time.sleep(float(seconds))
            return np.float32(0)

        return x + tf.ensure_shape(tf.numpy_function(wait, [x[0, 0]], tf.float32), [])


@pytest.mark.telling("1")
@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_tower_is_found_by_its_span(slow, pause, tmp_path):
    x = np.zeros([60, 64], "float32")
    x[30 * slow, 0] = pause  # the first row of its shard
    batches = itertools.repeat((tf.constant(x), tf.zeros([60, 4])))
    found = anatomy.measure(make_step(2, layers=[Waits()]), batches, tmp_path, num_steps=4)
    assert_slow(found, "towers")
    lengths = [span.end - span.begin for span in found.spans]
    assert lengths[slow] > 0.5 * found.step_seconds
    assert lengths[slow] > lengths[1 - slow]


class SlowSGD(keras.optimizers.SGD):
    pause = 0.0

    def apply(self, grads, trainable_variables=None):
        def wait():
            time.sleep(self.pause)
            return np.float32(0)

        with tf.control_dependencies([tf.numpy_function(wait, [], tf.float32)]):
            grads = [tf.IndexedSlices(tf.identity(g.values), g.indices, g.dense_shape)
                     if isinstance(g, tf.IndexedSlices) else tf.identity(g) for g in grads]
        super().apply(grads, trainable_variables)


def test_a_slow_update_is_found_as_such(pause, tmp_path):
    optimizer = SlowSGD()
    optimizer.pause = pause
    assert_slow(anatomy.measure(*embedding_step(optimizer), tmp_path, num_steps=4), "update")


def test_tensorboard_and_chrome_get_their_traces(tmp_path):
    anatomy.measure(make_step(2), make_batches(), tmp_path, num_steps=4)
    (profile,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")
    assert profile.stat().st_size > 0
    rows = list(traced_rows(tmp_path))
    assert rows[:7] == ["input", "parameters", "towers", "sum", "update", "tower 0", "tower 1"]
    events = [event["name"] for entries in traced_rows(tmp_path).values() for event in entries]
    assert "tower_1/PartitionedCall:PartitionedCall" in events


def test_the_step_is_the_same_as_without_measuring(tmp_path):
    """No graph is traced for it, and none changes."""
    step = make_step(2)
    batch = next(make_batches())
    step.train_batch(*batch)
    (before,) = step.traces
    operations = [op.name for op in before.graph.get_operations()]
    anatomy.measure(
        step, itertools.repeat(batch), tmp_path, num_steps=4, prefetch_to_devices=False
    )
    assert step.traces == [before]
    assert [op.name for op in before.graph.get_operations()] == operations


# Hand-made steps: a clock and profiles that say what they are told to, so that all is exact.

#              [seconds of a phase, events of the host that begin in it]
HAND_MADE = {
    "input": (0.002, 1), "parameters": (0.001, 1), "tower_0": (0.080, 6), "update": (0.030, 1),
    "": (0.007, 1),
}
NAMES = {"input": phases.INPUT_MARK, "parameters": "parameters/Read:Read",
         "tower_0": "tower_0/Call:Call", "update": "update/Call:Call", "": "other"}


def hand_made_step(begin, longer=0.0):
    """Events of one step of 0.120 s; with `longer` more of the host's own."""
    events = []
    for scope, (seconds, count) in HAND_MADE.items():
        end = begin + seconds
        events.append(Event(HOST, "thread", NAMES[scope], begin, end))
        for i in range(1, count):
            events.append(Event(HOST, "thread", "kernel", begin + i * seconds / 10, end))
        begin = end
    return events, begin + longer


def hand_made_profile(longer):
    """The step before the one that is measured, that one, and the mark of the last."""
    first, begin = hand_made_step(0.0)
    second, begin = hand_made_step(begin, longer)
    return [*first, *second, Event(HOST, "thread", phases.INPUT_MARK, begin, begin)]


@pytest.fixture(name="hand_made")
def _hand_made(monkeypatch):
    """measure(additions=seconds, ...) -> Anatomy, of steps of 0.110 s without the profiler.

    Each of 4 rounds measures one step of either kind, and the additions twice. The first and the
    last round are disturbed: the middle half of the steps is that of the other two.
    """
    def measure(directory, additions=(0.004, 0.003), recording_seconds=1e-3):
        profiles = []
        for longer in (0.9, 0.0, 0.0, -0.004):
            profiles += [
                hand_made_profile(longer),
                [Event(HOST, "thread", f"additions/Call_{i}:Call", 1.0, 1.0 + seconds)
                 for i, seconds in enumerate(additions)],
            ]
        # A round reads the clock 3 times for two steps without the profiler, 4 for three with it.
        steps = [0.110] * 5  # of the warm-up
        for measured in (0.700, 0.110, 0.110, 0.050):
            steps += [0.0, 5.0, measured, 0.0, *[7.0] * 3]
        clock = itertools.accumulate(itertools.chain([0.0], steps))
        monkeypatch.setattr(anatomy, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
        monkeypatch.setattr(anatomy, "read_events", lambda directory: profiles.pop(0))
        monkeypatch.setattr(phases, "RECORDING_SECONDS", recording_seconds)
        found = anatomy.measure(make_step(1), make_batches(), directory, num_steps=4)
        assert not profiles and next(clock, None) is None  # all was asked for
        return found

    return measure


def test_the_profilers_addition_is_taken_off_by_events_as_computed_by_hand(hand_made, tmp_path):
    found = hand_made(tmp_path)
    assert found.step_seconds == pytest.approx(0.110, rel=1e-9)
    assert found.profiled_seconds == pytest.approx(0.120, rel=1e-9)
    # 10 ms for 10 events. Of the update's remaining 29 ms the additions, alone 3 of the 30 that it
    # took at least, get a tenth.
    assert found.seconds == pytest.approx({
        "input": 0.001, "parameters": 0.0, "towers": 0.074, "sum": 0.0029, "update": 0.0261,
        "host": 0.006,
    }, rel=1e-9, abs=1e-15)
    (span,) = found.spans
    assert (span.towers, span.device) == ((0, 0), "/cpu:0")
    assert span.begin == pytest.approx(0.003 * 74 / 80, rel=1e-9)
    assert span.end == pytest.approx(0.083 * 74 / 80, rel=1e-9)


def test_where_recording_costs_nothing_all_phases_are_scaled_alike(hand_made, tmp_path):
    found = hand_made(tmp_path, additions=(), recording_seconds=0.0)
    scale = 0.110 / 0.120
    assert found.seconds == pytest.approx({
        "input": 0.002 * scale, "parameters": 0.001 * scale, "towers": 0.080 * scale, "sum": 0.0,
        "update": 0.030 * scale, "host": 0.007 * scale,
    }, rel=1e-9, abs=1e-15)
    (span,) = found.spans
    assert span.end - span.begin == pytest.approx(found.seconds["towers"], rel=1e-9)


def test_additions_as_long_as_the_update_leave_it_nothing(hand_made, tmp_path):
    found = hand_made(tmp_path, additions=(0.040, 0.050))
    assert found.seconds["update"] == 0
    assert found.seconds["sum"] == pytest.approx(0.029, rel=1e-9)


def test_batches_are_full_ones_epoch_after_epoch():
    x, y = np.arange(7, dtype=np.float32)[:, None], np.arange(7, dtype=np.int32)
    batches = anatomy.full_batches(load_examples((x, y)), 3, seed=0)
    sizes = [y.shape[0] for _, y in itertools.islice(batches, 5)]
    assert sizes == [3] * 5
    (_, y), = itertools.islice(anatomy.full_batches(load_examples((x, y)), 9, seed=0), 1)
    assert sorted(y.numpy()) == list(range(7))
