"""The lines before the first epoch of a resumed run, and after the last of any."""

import hashlib
import io
import math
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from towers.app.config import TrainConfig
from towers.app.reporting import report
from towers.app.reporting.report import Report
from towers.resume.checkpointer import Found
from towers.resume.checkpoints import Checkpoint
from towers.resume.train_state import Monitor, TrainState

WEIGHTS = f"; weights {hashlib.sha256().hexdigest()[:8]}"


def lines_of(describe, *arguments, **options):
    stream = io.StringIO()
    describe(*arguments, Report(stream), **options)
    return stream.getvalue().splitlines()


def run_of(iterations, values=(0.75, 0.5), **config):
    """As much of a run as is looked at: 4 steps an epoch."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Flatten()])  # without weights
    model.history = SimpleNamespace(history={"val_accuracy": list(values)})
    step = SimpleNamespace(model=model, optimizer=SimpleNamespace(iterations=iterations))
    return SimpleNamespace(
        config=TrainConfig(**config), step=step, steps_an_epoch=4, monitor=Monitor(),
        first_iteration=100,
    )


def test_a_resumed_run_says_from_where_and_warns_of_damaged_checkpoints():
    found = Found(Path("epoch-1-step-4"), Checkpoint({}, {}), ["epoch-2-step-8 is damaged: x"])
    assert lines_of(report.describe_resumed, found, TrainState(step=1502)) == [
        "Warning   epoch-2-step-8 is damaged: x; an older one takes its place.",
        "Resume    from step 1,502: epoch-1-step-4",
    ]
    assert lines_of(report.describe_resumed, None, TrainState()) == [
        "Resume    no checkpoint yet: from step 0"
    ]


def test_the_words_that_continue_a_run_are_those_that_began_it(monkeypatch):
    config = TrainConfig()
    assert report.resume_words(config, Path("a run"), nonfinite="skip") == (
        "python train.py --resume='a run' --nonfinite=skip"
    )
    monkeypatch.setattr("sys.argv", ["/environment/bin/towers-train", "--epochs=3"])
    assert report.resume_words(config, "run") == "towers-train --resume=run"
    monkeypatch.setattr(report, "is_python", lambda config: True)
    assert report.resume_words(config, "run", nonfinite="skip") == (
        "the same script, with towers.TrainConfig(resume='run', nonfinite='skip')"
    )


@pytest.mark.parametrize(("patience", "early"), [(None, ""), (1, ", stopped early")])
def test_a_complete_run_says_whether_it_was_stopped_early(patience, early):
    history = {"val_accuracy": [0.75, 0.5]}
    train_state = TrainState(step=8, epoch=2, history=history, best_step=4, epochs_since_best=1)
    assert lines_of(report.describe_complete, run_of(8, early_stopping=patience), train_state) == [
        f"Already complete: 2 epochs{early}, best val_accuracy 0.7500 (epoch 1)"
    ]


@pytest.mark.parametrize(("step", "saved", "has_final", "models", "done"), [
    (8, None, True, "final.keras holds the weights after 2 epochs", "Trained: 2 epochs"),
    (6, 4, True, "final.keras holds the weights after 6 steps, best.keras those of epoch 1, the "
     "best by val_accuracy", "Done: 6 steps"),
    (4, 4, False, "final.keras is not written, best.keras holds the weights of epoch 1, the best "
     "by val_accuracy", "Trained: 1 epoch"),
    (1500, 8, False, "final.keras is not written, best.keras holds the weights of epoch 2",
     "Trained: 375 epochs"),
])
def test_the_end_says_which_file_holds_which_weights(step, saved, has_final, models, done):
    train_state = TrainState(step=step, best_step=4, epochs_since_best=1, best_saved=saved)
    assert lines_of(
        report.describe_end, run_of(100 + step), train_state, 61.0, has_final=has_final
    ) == [f"Models    {models}", f"{done} in 1:01, best val_accuracy 0.7500 (epoch 1){WEIGHTS}"]


@pytest.mark.parametrize(("values", "best"), [
    ([0.5, 0.75, 0.75], "best val_accuracy 0.7500 (epoch 2)"),
    ([math.nan, 0.5], "best val_accuracy 0.5000 (epoch 2)"),
    ([math.nan], "no finite val_accuracy"),
    ([], "no epoch is complete"),
])
def test_the_end_names_the_first_of_the_best_epochs_and_counts_what_was_left_out(values, best):
    train_state = TrainState(step=1500)
    done = lines_of(report.describe_end, run_of(1599, values), train_state, 61.0)[-1]
    assert done == f"Done: 375 epochs in 1:01, {best}; 1 of 1,500 updates left out{WEIGHTS}"
