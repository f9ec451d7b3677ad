"""What a run says before its first step, and --devices, --plan and --profile."""

import io
import re
from functools import partial

import keras
import pytest
import tensorflow as tf

import towers
from tests.app import run_test
from tests.machine.fake_gpus import use_nvml
from towers.app.config import TrainConfig
from towers.app.diagnosis import describe
from towers.app.reporting.report import Report
from towers.app.training.build import build
from towers.machine import nvidia
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
    "batch_size, num_towers, num_examples, expected",
    [
        (100, 8, 60000, "100 global = 8 towers x 12-13; 600 steps an epoch"),
        (7, 3, 8, "7 global = 3 towers x 2-3; 2 steps an epoch (last: 1 = 3 x 0-1)"),
        (1024, 1, 10, "1,024 global = 1 tower x 1,024; 1 step an epoch (last: 10 = 1 x 10)"),
    ],
)
def test_the_batch_line_gives_the_true_split(batch_size, num_towers, num_examples, expected):
    assert describe.batch_split(batch_size, num_towers, num_examples) == expected


@pytest.fixture(scope="module")
def run():
    return build(config(num_towers=4))


def test_an_unusual_split_of_the_batch_is_warned_of(run):
    *_, warning = lines_of(describe.describe, run._replace(batch_size=3), "run")
    assert warning.startswith("Warning")
    assert "does not divide by the 4 towers, which get 0-1 examples" in warning


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
