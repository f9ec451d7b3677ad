"""What a run says before its first step, and --devices, --plan and --profile."""

import dataclasses
import io
import itertools
import re
import time
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.app import run_test
from tests.machine.fake_gpus import use_nvml
from towers.app.config import TrainConfig
from towers.app.datasets.batches import load_examples
from towers.app.diagnosis import describe, plan, profile
from towers.app.diagnosis.profile import GRADIENTS, Profile, UPDATE, WAITING
from towers.app.reporting.report import Report
from towers.app.training.build import build
from towers.machine import nvidia
from towers.machine.devices import CPU, GPU
from towers.divide.tower_step import TowerStep
from towers.workers.cluster import Cluster

config = partial(run_test.config, device="cpu")
NO_GPUS = pytest.mark.skipif(
    bool(tf.config.list_physical_devices("GPU")), reason="this machine has a GPU"
)


@pytest.fixture(autouse=True)
def _no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(nvidia, "DRIVER_VERSION", tmp_path / "absent")
    use_nvml(monkeypatch)


def lines_of(act, run, *arguments):
    stream = io.StringIO()
    act(run, Report(stream), *arguments)
    return stream.getvalue().splitlines()


@pytest.fixture(name="rehearsed", params=["0", "1"])
def _rehearsed(request, monkeypatch):
    monkeypatch.setenv("TOWERS_REHEARSE_GPUS", request.param)
    return request.param == "1"


@NO_GPUS
def test_versions_devices_batch_data_and_model_have_a_line_each(rehearsed):
    run = build(config(num_towers=4, optimizer="sgd", learning_rate=0.5, seed=3))
    lines = lines_of(describe.describe, run, "run: here")
    versions = [
        f"{name} {'.'.join(module.__version__.split('.')[:2])}"
        for name, module in (("towers", towers), ("TensorFlow", tf), ("Keras", keras))
    ]
    assert lines.pop(0) == f"{versions[0]} | {versions[1]}, {versions[2]} | run: here"
    if rehearsed:
        assert lines.pop(2).strip() == "TOWERS_REHEARSE_GPUS=1: they follow the policy of GPUs"
    assert lines == [
        "Devices   parameters on /cpu:0; towers 0-3 on /cpu:0, /cpu:1 (2 each)",
        "          no GPU here: towers run on logical CPU devices",
        "Batch     16 global = 4 towers x 4; 4 steps an epoch (last: 2 = 4 x 0-1)",
        "Data      tests.app.run_test:small_data: 50 train, 20 test",
        # 3 x 8 + 8 and 8 x 3 + 3 parameters
        "Model     tests.app.run_test:small_model, 59 parameters; sgd, learning rate 0.5; seed 3",
    ]


@pytest.mark.parametrize(
    ("batch_size", "num_towers", "num_examples", "expected"),
    [
        (128, 8, 60000, "128 global = 8 towers x 16; 469 steps an epoch (last: 96 = 8 x 12)"),
        (100, 8, 60000, "100 global = 8 towers x 12-13; 600 steps an epoch"),
        (7, 3, 8, "7 global = 3 towers x 2-3; 2 steps an epoch (last: 1 = 3 x 0-1)"),
        (1024, 1, 10, "1,024 global = 1 tower x 1,024; 1 step an epoch (last: 10 = 1 x 10)"),
    ],
)
def test_the_batch_line_gives_the_true_split(batch_size, num_towers, num_examples, expected):
    assert describe.batch_split(batch_size, num_towers, num_examples) == expected


@pytest.fixture(name="run", scope="module")
def _run():
    return build(config(num_towers=4))


@pytest.mark.parametrize(
    ("batch_size", "words"),
    [
        (3, "does not divide by the 4 towers, which get 0-1 examples"),
        (10, "get 2-3 examples"),
    ],
)
def test_an_unusual_split_of_the_batch_is_warned_of(batch_size, words, run):
    *_, warning = lines_of(describe.describe, run._replace(batch_size=batch_size), "run")
    assert warning.startswith("Warning") and words in warning


def test_several_workers_are_counted_and_told_that_their_network_must_be_private(run, monkeypatch):
    monkeypatch.setattr(run.step, "cluster", Cluster(("a:1", "b:1"), 0))
    workers = lines_of(describe.describe, run, "run")[1]
    assert workers.startswith("Workers   2, this is 0, the chief; 4 towers, 2 each; ")
    assert workers.endswith("on private networks only")


def test_a_loss_scaled_optimizer_is_called_by_its_own_name():
    run = build(config(precision="mixed_float16", optimizer="adam"))
    assert "; adam, learning rate " in lines_of(describe.describe, run, "run")[-1]


@NO_GPUS
def test_the_plan_counts_what_a_step_moves():
    _, here, there, total, how, *layers = lines_of(describe.show_plan, build(config()))
    names = [line.split()[0] for line in layers]
    assert names == ["device", "/cpu:0", "/cpu:1", "layer", "body", "head"]
    assert here.split() == ["/cpu:0", "0", "8", *"----00"]
    assert there.startswith("/cpu:1  1       8         252 bytes      128 bytes ")
    assert total == "Each step moves 380 bytes to the devices and 248 bytes from them."
    assert how.startswith("Counted as on GPUs")  # out: losses, gradients, right predictions


def blocks(**values):
    """{label: [lines]} of all but the title."""
    found, last = {}, ""
    for line in describe.device_report(TrainConfig(**values))[1:]:
        last = line[:10].strip() or last
        found.setdefault(last, []).append(line[10:])
    return found


def test_the_title_names_the_versions_and_the_towers_devices_are_those_of_a_run():
    title = describe.device_report(TrainConfig())[0]
    assert title.startswith("towers ") and tf.__version__ in title
    assert blocks(device="cpu", num_gpus=2, num_towers=4)["Devices"] == [
        "parameters on /cpu:0; towers 0-3 on /cpu:0, /cpu:1 (2 each)"
    ]


def test_devices_that_a_run_would_not_get_are_a_line_and_no_error():
    (line,) = blocks(device="cpu", num_gpus=9)["Devices"]
    assert re.match(r"none: (--)?num_gpus \(9\) is more than", line)


def test_the_drivers_gpus_are_listed_with_their_memory(monkeypatch):
    assert blocks()["Driver"] == ["not found"]
    gpus = ("Tesla T4", "GPU-1", 15360, 15000), ("NVIDIA GB10", "GPU-2", 0, 0)
    use_nvml(monkeypatch, *gpus)
    assert blocks()["Driver"] == [
        "found",
        "GPU 0  Tesla T4, 15360 MiB, 15000 MiB free",
        "GPU 1  NVIDIA GB10, [N/A] MiB, [N/A] MiB free",
    ]


@NO_GPUS
def test_without_a_gpu_the_reasons_are_given(monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    first, second = blocks()["GPUs"]
    assert first.startswith("none: no NVIDIA driver")
    assert second == "CUDA_VISIBLE_DEVICES='' hides GPUs, or names none of this machine: unset it"


# The transfers of a step, counted by hand
L = keras.layers
WEIGHTS = (3 * 5 + 5) * 4
PLACE = 4 * 4  # where a tower's rows are in the batch
LOSSES = 2 * 4  # for the update, and for the running mean


def traffic(num_towers, devices, batch_size=12, layers=(), policy=GPU, **options):
    """Of a dense layer of 3 x 5, 4 bytes a number."""
    with tf.device("/cpu:0"):
        model = keras.Sequential([keras.Input((3,)), L.Dense(5), *layers])
    step = TowerStep(
        model,
        "sgd",
        "mse",
        devices=devices,
        num_towers=num_towers,
        policy=policy,
        batch_norm="average",
        **options,
    )
    specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None, 5])
    return plan.traffic(step, batch_size, specs)


def example_bytes(count):
    return count * (3 + 5) * 4


def test_the_parameters_device_moves_nothing_and_the_others_each_their_part():
    here, there = traffic(2, ["/cpu:0", "/cpu:1"], batch_size=7).values()
    assert here == plan.Traffic((0, 0), [4])
    # in: kernel and bias as one, the tower's place, x and y; out: the sums as one
    assert there == plan.Traffic(
        (1, 1), [3], WEIGHTS + PLACE, example_bytes(3), 0, LOSSES + WEIGHTS, 4, 1
    )


def test_statistics_and_noise_go_down_and_only_sums_come_back():
    layers = [L.BatchNormalization(), L.Dropout(0.5)]
    first, second = traffic(2, ["/cpu:1", "/cpu:2"], layers=layers).values()
    trained, statistics, noise = WEIGHTS + (5 + 5) * 4, (5 + 5) * 4, 3 * 8  # a key and a counter
    weight = 4 + 4 + 1  # of the statistics: the tower's rows, all rows, whether it has any
    for each in (first, second):
        assert each.parameters == trained + statistics + noise + PLACE + weight
    assert second.results == first.sums == first.results == LOSSES + trained + statistics


@pytest.mark.telling("6-3-*")
@pytest.mark.parametrize(
    ("num_towers", "count", "sums"),
    [
        (4, 2, [1, 1]),  # ((0 1) (2 3))
        (6, 2, [1, 1]),  # (((0 1) 2) ((3 4) 5))
        (6, 3, [1, 2, 2]),  # 2 and (3 4 5) leave the second
    ],
)
def test_sums_leave_a_device_for_that_of_the_left_child_or_home(num_towers, count, sums):
    rows = traffic(num_towers, [f"/cpu:{i + 1}" for i in range(count)]).values()
    assert [row.results for row in rows] == [k * (LOSSES + WEIGHTS) for k in sums]


def test_copies_exchange_slices_of_gradients_and_of_their_sums():
    rows = traffic(4, [f"/cpu:{i}" for i in range(4)], strategy="mirrored")
    a_slice = WEIGHTS // 4
    for device in ("/cpu:1", "/cpu:2", "/cpu:3"):
        few_scalars = rows[device].sums - 6 * a_slice - PLACE  # such as the learning rate
        assert 4 <= few_scalars <= 20
        assert rows[device].inputs == example_bytes(3)


def test_unpacked_every_tensor_is_a_send():
    packed, apart = (
        traffic(1, ["/cpu:1"], policy=dataclasses.replace(GPU, pack_transfers=packs))["/cpu:1"]
        for packs in (True, False)
    )
    # kernel and bias; two losses and the gradients of both
    assert (apart.sends_in, apart.sends_out) == (packed.sends_in + 1, packed.sends_out + 3)
    assert (apart.parameters, apart.results) == (packed.parameters, packed.results)


def test_the_table_lines_up_and_adds_up():
    assert plan.table(traffic(3, ["/cpu:0", "/cpu:1"], batch_size=8)) == [
        "device  towers  examples  parameters in  examples in  sums in  results out  sends in  "
        "sends out",
        "/cpu:0  0-1     2 x 3     -              -            -        -            0         0",
        "/cpu:1  2       2         96 bytes       64 bytes     -        88 bytes     4         1",
        "Each step moves 160 bytes to the devices and 88 bytes from them.",
    ]


def test_the_stages_have_their_devices_layers_and_bytes_of_parameters():
    x = keras.Input((4,))
    first = L.Dense(5, name="first")(x)
    second = L.Dense(6, name="second", activation="tanh")(first)
    model = keras.Model(x, L.Dense(7, name="third")(L.Concatenate(name="both")([first, second])))
    step = TowerStep(
        model,
        "sgd",
        "mse",
        devices=[f"/cpu:{i}" for i in range(6)],
        num_towers=4,
        gpus_per_tower=3,
        stages=["second", "both"],
        policy=GPU,
    )
    lines = [re.split(r" {2,}", line) for line in plan.stage_table(step)]
    _, on, parameters, most_towers, layers = zip(*lines[1:])
    assert on == ("/cpu:0, /cpu:3", "/cpu:1, /cpu:4", "/cpu:2, /cpu:5")
    assert parameters == ("100 bytes", "144 bytes", "336 bytes")  # 5 x 5, 6 x 6, 12 x 7 numbers
    assert most_towers == ("2", "2", "1")
    assert layers == ("first", "second", "both ... third (2)")
    assert plan.layer_table(step, batch_size=6) == [  # towers of 2, 2, 1 and 1 rows
        "layer   device          largest output  bytes     variables",
        "first   /cpu:0, /cpu:3  2 x 5           40 bytes  100 bytes",
        "second  /cpu:1, /cpu:4  2 x 6           48 bytes  144 bytes",
        "both    /cpu:2, /cpu:5  2 x 11          88 bytes  -",
        "third   /cpu:2, /cpu:5  2 x 7           56 bytes  336 bytes",
    ]


def test_the_layers_of_any_model_have_their_rows_or_are_left_out():
    twice, x = L.Dense(4, name="twice"), keras.Input((4,))
    mean = keras.ops.mean(twice(twice(x)), axis=None)  # has no rows
    step = TowerStep(keras.Model(x, mean), "sgd", "mse", devices=[f"/cpu:{i}" for i in range(4)])
    _, first, second, last = plan.layer_table(step, batch_size=8)
    assert first == "twice  /cpu:0 ... /cpu:3  2 x 4           32 bytes  80 bytes"
    assert second == "twice  /cpu:0 ... /cpu:3  2 x 4           32 bytes  -"
    assert last.split()[-4:] == ["/cpu:3", "4", "bytes", "-"]
    own = type("Own", (keras.Model,), {"call": lambda self, x: twice(x)})()
    own.build((None, 4))
    assert plan.layer_table(TowerStep(own, "sgd", "mse"), batch_size=8) == []


# Where a step's time goes: steps made of pauses, and one real run
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


@pytest.mark.telling("0.08-*")
@pytest.mark.parametrize(
    "of_input, of_gradients, of_update, longest",
    [
        (0.08, 0.03, 0.02, WAITING),
        (0.01, 0.08, 0.02, GRADIENTS),
        (0.01, 0.03, 0.08, UPDATE),
    ],
)
def test_each_part_has_its_time_and_they_add_up_to_the_step(
    of_input, of_gradients, of_update, longest, tmp_path
):
    found = measured(tmp_path, Pauses(of_gradients / 8, of_update), of_input)
    expected = {WAITING: of_input, GRADIENTS: of_gradients, UPDATE: of_update}
    assert found.parts == pytest.approx(expected, abs=0.015)
    assert sum(found.parts.values()) == pytest.approx(found.whole)
    assert max(found.parts, key=found.parts.get) == longest
    assert list(tmp_path.glob("plugins/profile/*/*.xplane.pb"))


def test_what_more_gpus_and_a_larger_batch_would_bring_as_computed_by_hand():
    found = Profile(8, 0.10, 0.01, 0.10, {4: 0.05, 8: 0.08, 16: 0.14})
    assert found.speedup(0.5, 1) == pytest.approx(0.10 / 0.07)
    assert found.speedup(2, 2) == pytest.approx(2 * 0.10 / 0.16)
    by_input = found._replace(input=0.10)
    assert by_input.speedup(0.5, 1) == by_input.speedup(2, 2) == 1


@pytest.mark.telling("8-100")
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
        (GPUS, (0.1, 1.0, 0.9), ["gradients, 90%", "--jit_compile", "at most 1.8 times"]),
        (CPUS, (0.1, 1.0, 0.9), ["a GPU", "share the cores", "--num_towers="]),
        (GPUS, (0.1, 1.0, 0.2), ["update, 80%", "--variable_device=gpu", "1.1 times", "1.7 times"]),
        (CPUS, (0.1, 1.0, 0.2), ["update, 80%", "--batch_size"]),
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
    ("noise", "shown"),
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


def test_a_run_is_measured_and_left_as_it_was(run, tmp_path):
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
