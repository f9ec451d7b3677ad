"""The benchmarks' pieces work; how fast anything is, they do not ask."""

import csv
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from benchmarks import contender, process, readme, rounds, scaling, training
from benchmarks.clocks import Clock
from benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"

ON_GPUS = {"on_gpu", "copies", "stages_2", "stages_4"}  # or where these are rehearsed
INPUT_SHAPE, NUM_CLASSES = (4,), 2  # of `linear`, for train.py's synthetic examples


def run(script, *flags):
    """The rows that a benchmark's script writes to its CSV, the last of the flags."""
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}", *flags], cwd=ROOT, capture_output=True,
        text=True, timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with open(flags[-1].removeprefix("--out="), newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["command"] for row in rows} == {f"python benchmarks/{script} {' '.join(flags)}"}
    assert all(float(row["value"]) > 0 and float(row["ratio"]) > 0 for row in rows)
    return rows


def linear(input_shape, num_classes):
    return keras.Sequential([
        keras.Input(input_shape), keras.layers.Dense(num_classes, activation="softmax"),
    ])


def tiny_batches(num_batches, passes=1):
    workload = WORKLOADS["tiny"]()
    x, y = workload.data(num_batches)
    return contender.batches(x, y, workload.batch_size, passes)


def measured(speed, memory=100.0):
    return {"examples_per_second": speed, "peak_memory_mb": memory, "device": "CPU"}


def make_rows(num_devices=2, peer_speed=50.0):
    """Ratios 100/50, 90/22.5, 80/80: 2, 4 and 1 with a peer speed of 50."""
    results = [
        {"towers": measured(100.0), "fit": measured(peer_speed)},
        {"towers": measured(90.0), "fit": measured(22.5)},
        {"towers": measured(80.0), "fit": measured(80.0, memory=70.6)},
    ]
    return rounds.compare(
        results, "towers", "examples_per_second", workload="tiny", num_devices=num_devices
    )


@pytest.mark.telling("towers", "fit", "mirrored")
@pytest.mark.parametrize("name", sorted({*contender.CONTENDERS} - ON_GPUS))
def test_a_contender_notes_when_each_step_ends(name):
    clock = Clock()
    contender.trainer(name, WORKLOADS["tiny"](), 2).train(tiny_batches(2, passes=2), clock)
    assert len(clock.times) == 4
    assert sorted(clock.times) == clock.times


@pytest.mark.parametrize(("step_class", "changes"), [("towers", True), ("limit", False)])
def test_the_limit_alone_changes_no_parameter(step_class, changes):
    workload, models = WORKLOADS["tiny"](), []

    def build():
        models.append(linear(INPUT_SHAPE, NUM_CLASSES))
        return models[0]

    object.__setattr__(workload, "build", build)
    train = contender.tower_trainer(workload, step_class, num_devices=2).train
    before = [v.numpy() for v in models[0].trainable_variables]
    train(tiny_batches(2), Clock())
    after = [v.numpy() for v in models[0].trainable_variables]
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    assert same == [not changes] * 2


def test_ratios_are_taken_within_a_round_and_a_repeated_comparison_counts_once():
    rows = make_rows()
    assert [row["ratio"] for row in rows] == [2.0, 4.0, 1.0]
    assert {row["median_ratio"] for row in rows} == {2.0}  # mean: 2.33; of medians: 1.8
    assert [row["peer_peak_memory_mb"] for row in rows] == [100, 100, 71]
    assert rounds.table(rows).splitlines()[1].split() == [
        "tiny", "2", "towers", "90.0", "fit", "50.0", "2.00"
    ]
    rows += [*make_rows(num_devices=8), *make_rows(peer_speed=25.0)]
    assert [(len(group), group[0]["num_devices"], group[0]["peer_value"])
            for group in rounds.groups(rows)] == [(3, 2, 25.0), (3, 8, 50.0)]


def test_every_other_round_goes_backwards_and_a_peer_that_fails_is_left_out(monkeypatch, capsys):
    order = []

    def run_process(module, name):
        order.append(name)
        if name == "central":
            raise RuntimeError("BatchNormalization: no aggregation")
        return measured(50.0 if name == "fit" else 75.0)

    monkeypatch.setattr(rounds, "run_process", run_process)
    contenders = {name: {"name": name} for name in ("towers", "central", "fit")}
    rows = rounds.compare(
        rounds.run_rounds("contender", contenders, 3), "towers", "examples_per_second"
    )
    assert order == ["towers", "central", "fit", "fit", "towers", "towers", "fit"]
    assert [(row["peer"], row["ratio"]) for row in rows] == [("fit", 1.5)] * 3
    assert capsys.readouterr().out.count("central is left out: BatchNormalization") == 1
    with pytest.raises(RuntimeError, match="no aggregation"):
        rounds.run_rounds("contender", {"central": {"name": "central"}}, 1)


def test_a_process_that_fails_says_why():
    with pytest.raises(RuntimeError, match="No module named benchmarks.nothing"):
        process.run_process("nothing")
    written = 'I0000 oneDNN\nTraceback:\n  File "a.py"\nValueError: no\n\nbecause it is late\n'
    assert process.cause(written) == "ValueError: no\n\nbecause it is late"
    assert process.cause("FATAL Flags parsing error\n") == "FATAL Flags parsing error"


def test_a_csv_with_other_columns_is_left_alone(tmp_path):
    path = tmp_path / "old.csv"
    path.write_text("pair,ratio\n0,1.0\n")
    with pytest.raises(ValueError, match="--out .* has other columns"):
        rounds.append_csv(path, make_rows())
    assert path.read_text() == "pair,ratio\n0,1.0\n"


@pytest.mark.matrix
def test_the_throughput_command_writes_its_csv_and_its_chart(tmp_path):
    pytest.importorskip("matplotlib")
    (row,) = run("throughput.py", "--workloads=tiny", "--peers=limit", "--rounds=1", "--steps=3",
                 f"--chart={tmp_path}/out.png", f"--out={tmp_path}/out.csv")
    assert (row["contender"], row["peer"], row["steps"]) == ("towers", "limit", "3")
    assert row["tensorflow"] and row["processor"]
    assert (tmp_path / "out.png").read_bytes().startswith(PNG)


def test_steady_throughput_leaves_out_the_first_steps():
    times = [10.0, 20.0, 21.0, 23.0, 24.0]  # from step 2's end: 3 batches of 128 in 4 seconds
    assert training.throughput(times, 128, untimed=2) == {
        "examples_per_second": 96.0, "timed_seconds": 4.0
    }


@pytest.mark.parametrize("page", readme.PAGES, ids=lambda page: page.name)
def test_measured_figures_on_pages_are_those_of_the_results(page):
    text = page.read_text(encoding="utf-8")
    written = readme.written(page, text, readme.Results())
    assert written == text, "run python benchmarks/readme.py"
    name = readme.PAGES[page][0]
    with pytest.raises(ValueError, match=f"{page.name} has 0 places .* {name!r}"):
        readme.written(page, text.replace(f"figures: {name}", "figures: no"), readme.Results())


@pytest.mark.matrix
def test_placements_are_compared_by_time_memory_and_cpu(tmp_path):
    rows = run("placements.py", "--workload=mlp", "--num_devices=2", "--steps=2", "--rounds=1",
               "--compared=copies:towers,stages_2:towers", f"--out={tmp_path}/out.csv")
    assert [(row["contender"], row["measure"]) for row in rows] == [
        ("copies", "first_step_seconds"), ("copies", "examples_per_second"),
        ("copies", "peak_memory_mb"), ("stages_2", "first_step_seconds"),
        ("stages_2", "cpu_seconds_per_step"),
    ]


@pytest.mark.matrix
def test_the_machines_command_writes_each_part_to_its_csv(tmp_path):
    """20 MB are 8 large tensors, which travel one by one; 0.1 MB are 8 that travel as one."""
    rows = run("machines.py", "--workloads=tiny", "--workers=2", "--megabytes=0.1,20", "--rounds=1",
               "--steps=3", "--memory_steps=5,20", f"--out={tmp_path}/out.csv")
    assert [tuple(row[name] for name in ("workload", "contender", "peer", "measure", "round"))
            for row in rows] == [
        ("tiny", "2 workers", "1 worker", "examples_per_second", "0"),
        ("0.1 MB", "exchange", "ring", "ms", "0"),
        ("20 MB", "exchange", "ring", "ms", "0"),
        ("tiny", "20 steps", "5 steps", "memory_mb", "0"),  # a round is a worker
        ("tiny", "20 steps", "5 steps", "memory_mb", "1"),
    ]
    # Of 2 workers each sends half of its sums, and half of its gradients.
    assert [float(row["sent_mb"]) for row in rows[1:3]] == pytest.approx([0.1, 20], rel=0.5)


def test_the_model_of_a_step_finds_the_constants_that_made_its_figures():
    true = scaling.Constants(start=1e-3, message=2e-3, wire=4e8, memory=5e9)
    made = {
        (workers, size): max(1, workers / 2) * scaling.exchange_seconds(
            true, workers, size, scaling.sums_of(size)
        )
        for workers in (2, 4, 8) for size in (1e5, 4.8e6, 32e6)
    }
    found = scaling.fit(made, true.memory, cores=2)
    assert (found.start, found.message, found.wire) == pytest.approx(
        (true.start, true.message, true.wire)
    )


def test_a_step_on_more_workers_than_cores_takes_turns():
    """1 s of computation, 4 MB, one sum of 2 x 3 messages: by hand."""
    one = scaling.Constants(start=2e-3, message=1e-3, wire=1e9, memory=1e9)
    size = scaling.Size(parameters=4e6, sums=1, passes=5, batch_size=8)
    assert scaling.predict(one, size, 1.0, "4 towers", cores=2) == pytest.approx(1 + 8 * 4e-3)
    each = 5 * 4e-3 + 8e-3 + 6e-3 + 9e-3  # update, start and messages, 6 MB sent, 9 MB added
    assert scaling.predict(one, size, 1.0, "4 workers", cores=2) == pytest.approx(1 + 2 * each)
