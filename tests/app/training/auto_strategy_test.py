"""`strategy="auto"`: the faster one is taken, nothing else changes."""

import json

import keras
import numpy as np
import pytest

import towers
from towers.resume.snapshot import copy_arrays, variables_of
from towers.app.config import TrainConfig
from towers.machine.policy import REHEARSAL
from towers.app.training import auto_strategy
from towers.app.training.build import build

pytestmark = pytest.mark.light  # not about updates or curves


def config(**options):
    return TrainConfig(**{
        "model": "mlp", "dataset": "synthetic", "batch_size": 16, "num_gpus": 2, "device": "cpu",
        "strategy": "auto", **options,
    })


def timed(monkeypatch, **milliseconds):
    """Lets the strategies' steps take so long, after they were really made."""
    real = auto_strategy.seconds_a_step

    def seconds(run, step):
        real(run, step)
        return milliseconds["mirrored" if step.strategy.num_copies else "server"] / 1000

    monkeypatch.setattr(auto_strategy, "seconds_a_step", seconds)


@pytest.mark.telling("10-9.4-*", "10-9.6-*", "inf-inf-*")
@pytest.mark.parametrize("server, mirrored, chosen", [
    (10, 9.4, "mirrored"), (10, 9.6, "parameter_server"),
    (10, float("inf"), "parameter_server"), (float("inf"),) * 2 + ("parameter_server",),
])
def test_copies_are_taken_where_they_are_5_percent_faster(server, mirrored, chosen, monkeypatch):
    monkeypatch.setenv(REHEARSAL, "1")
    timed(monkeypatch, server=server, mirrored=mirrored)
    run = auto_strategy.with_faster_strategy(build(config()))
    assert run.config.strategy == chosen
    assert run.step.strategy.num_copies == (chosen == "mirrored")
    assert run.notes == [
        f"strategy {chosen}; a step took {server:.1f} ms parameter_server, "
        f"{mirrored:.1f} ms mirrored"
    ]
    fresh = copy_arrays(variables_of(build(config(strategy="mirrored")).step))
    found = copy_arrays(variables_of(run.step))
    for (name, ours), theirs in zip(found.items(), fresh.values(), strict=False):
        if not name.startswith("metrics"):
            np.testing.assert_array_equal(ours, theirs)
    assert all(not np.any(v.numpy()) for v in run.step.metrics_variables)


@pytest.mark.matrix
def test_a_run_says_both_times_and_keeps_its_choice(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(REHEARSAL, "1")
    found, given = (str(tmp_path / name) for name in ("found", "given"))
    towers.train(config(max_steps=3, run_dir=found))
    said = capsys.readouterr().out
    choice = json.loads((tmp_path / "found" / "config.json").read_text())["strategy"]
    assert f"strategy {choice}; a step took " in said
    towers.train(TrainConfig(resume=found, max_steps=5))
    towers.train(config(max_steps=5, run_dir=given, strategy="parameter_server"))
    ends = [keras.saving.load_model(f"{path}/final.keras") for path in (found, given)]
    for a, b in zip(*(model.weights for model in ends), strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_in_one_memory_nothing_is_measured():
    run = auto_strategy.with_faster_strategy(build(config()))
    assert (run.config.strategy, run.step.strategy.num_copies, run.notes) == (
        "parameter_server", 0, []
    )


def test_two_numbers_at_once_are_not_found():
    with pytest.raises(ValueError, match="num_towers=auto and strategy=auto"):
        config(num_towers="auto")
