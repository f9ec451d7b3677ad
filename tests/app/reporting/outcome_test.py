"""The lines before the first epoch of a resumed run, and after the last of any."""

import io
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

from towers.resume.best import Best, Monitor
from towers.resume.train_state import TrainState
from towers.app.config import TrainConfig
from towers.app.reporting import outcome
from towers.app.reporting.report import Report
from towers.app.training.loaded import Loaded


def test_a_resumed_run_says_from_where():
    path = Path("run/checkpoints/epoch-3-step-1502")
    assert outcome.resumed_line(path, 1502).plain == (
        "Resume    from step 1,502: run/checkpoints/epoch-3-step-1502"
    )
    assert outcome.resumed_line(None, 0).plain == "Resume    no checkpoint yet: from step 0"


def test_a_stopped_run_says_how_to_go_on():
    assert outcome.stopped_line(Path("a run"), 1502, True).plain == (
        "saved at step 1502. Resume: python train.py --resume='a run'"
    )
    assert outcome.stopped_line(Path("run"), 4, False).plain == (
        "the last checkpoint is that of step 4. Resume: python train.py --resume=run"
    )
    assert outcome.stopped_line(Path("run"), 4, True, is_python=True).plain == (
        "saved at step 4. Resume: the same script, with towers.TrainConfig(resume='run')"
    )


def test_the_words_that_continue_a_run_are_those_that_began_it(monkeypatch):
    monkeypatch.setattr("sys.argv", ["/environment/bin/towers-train", "--epochs=3"])
    assert outcome.resume_words(Path("run")) == "towers-train --resume=run"


@pytest.mark.parametrize(
    ("count", "scale", "expected"),
    [
        (1, None, "1 update left out in this epoch: a NaN or infinite loss or gradient."),
        (1200, None, "1,200 updates left out in this epoch: a NaN or infinite loss or gradient."),
        (2, 16384.0, "2 updates left out in this epoch: a NaN or infinite loss or gradient; the "
                     "loss scale is 16,384 now."),
    ],
)
def test_updates_that_were_left_out_are_counted(count, scale, expected):
    assert outcome.skipped_warning(count, scale) == expected


def test_an_update_that_is_not_finite_names_its_step_and_the_ways_out():
    assert outcome.nonfinite_error("the loss of tower 2 is NaN.", 1502, Path("run")) == (
        "step 1,502: the loss of tower 2 is NaN. The update was not made. Lower `learning_rate`, "
        "or leave out such updates: python train.py --resume=run --nonfinite=skip."
    )
    assert outcome.nonfinite_error("It is NaN.", 1, Path("run"), is_python=True).endswith(
        "the same script, with towers.TrainConfig(resume='run', nonfinite='skip')."
    )


@pytest.mark.parametrize(
    ("step", "expected"),
    [(0, "0 epochs"), (4, "1 epoch"), (8, "2 epochs"), (6, "6 steps"), (1501, "1,501 steps")],
)
def test_an_amount_is_in_epochs_where_the_last_one_is_complete(step, expected):
    assert outcome.amount(step, 4) == expected


@pytest.mark.parametrize(
    ("values", "monitor", "expected"),
    [
        ([0.5, 0.75, 0.75], "val_accuracy", "best val_accuracy 0.7500 (epoch 2)"),
        ([2e-6], "val_loss", "best val_loss 2.000e-06 (epoch 1)"),
        ([0.5, 0.75], "loss", "best loss 0.5000 (epoch 1)"),
        ([math.nan, 0.5], "val_loss", "best val_loss 0.5000 (epoch 2)"),
        ([math.nan], "val_loss", "no finite val_loss"),
        ([], "val_loss", "no epoch is complete"),
    ],
)
def test_the_best_value_is_the_first_of_the_best_epochs(values, monitor, expected):
    assert outcome.best_value(values, Monitor(monitor, "accuracy" in monitor)) == expected


def test_the_last_lines_of_a_run():
    assert outcome.complete_line("2 epochs", False, "best x") == (
        "Already complete: 2 epochs, best x"
    )
    assert outcome.complete_line("2 epochs", True, "best x") == (
        "Already complete: 2 epochs, stopped early, best x"
    )
    assert outcome.models_line("2 epochs", None, "loss").plain == (
        "Models    final.keras holds the weights after 2 epochs"
    )
    assert outcome.models_line("6 steps", 1, "loss").plain == (
        "Models    final.keras holds the weights after 6 steps, best.keras those of epoch 1, the "
        "best by loss"
    )
    assert outcome.models_line(None, None, "loss").plain == "Models    final.keras is not written"
    assert outcome.models_line(None, 1, "loss", is_best=False).plain == (
        "Models    final.keras is not written, best.keras holds the weights of epoch 1"
    )
    assert outcome.done_line("2 epochs", 186.2, "best x", 0, 8) == "Done: 2 epochs in 3:06, best x"
    assert outcome.done_line("2 epochs", 186.2, "best x", 1, 1500) == (
        "Done: 2 epochs in 3:06, best x; 1 of 1,500 updates left out"
    )


# Of a run


@pytest.fixture(name="said")
def _said():
    """The lines, and a report that shows them."""
    stream = io.StringIO()
    return stream, Report(stream)


def run_of(iterations, **config):
    """As much of a run as is looked at: 4 steps an epoch."""
    model = SimpleNamespace(history=SimpleNamespace(history={"val_accuracy": [0.75, 0.5]}))
    step = SimpleNamespace(model=model, optimizer=SimpleNamespace(iterations=iterations))
    return SimpleNamespace(
        config=TrainConfig(**config), step=step, steps_an_epoch=4, monitor=Monitor(),
        first_iteration=0,
    )


def test_a_resumed_run_warns_of_newer_checkpoints_that_are_damaged(said):
    stream, out = said
    loaded = Loaded(Path("epoch-1-step-4"), TrainState(step=4), ["epoch-2-step-8 is damaged: x"])
    outcome.describe_resumed(loaded, out)
    outcome.describe_resumed(None, out)
    assert stream.getvalue().splitlines() == [
        "Warning   epoch-2-step-8 is damaged: x; an older one takes its place.",
        "Resume    from step 4: epoch-1-step-4",
        "Resume    no checkpoint yet: from step 0",
    ]


@pytest.mark.parametrize(("patience", "early"), [(None, ""), (1, ", stopped early")])
def test_a_complete_run_says_whether_it_was_stopped_early(patience, early, said):
    stream, out = said
    history = {"val_accuracy": [0.75, 0.5]}
    train_state = TrainState(step=8, epoch=2, history=history, best=Best(0.75, 4, 1))
    outcome.describe_complete(run_of(8, early_stopping=patience), train_state, out)
    assert stream.getvalue() == (
        f"Already complete: 2 epochs{early}, best val_accuracy 0.7500 (epoch 1)\n"
    )


def test_the_end_of_a_run_counts_what_was_left_out_and_names_the_best_epoch(said):
    stream, out = said
    train_state = TrainState(step=6, epoch=2, best=Best(0.75, 4, 1), best_saved=4)
    assert outcome.num_skipped(run_of(5), train_state) == 1
    trained_before = run_of(105)
    trained_before.first_iteration = 100
    assert outcome.num_skipped(trained_before, train_state) == 1
    outcome.describe_end(run_of(5), train_state, 61.0, out)
    assert stream.getvalue().splitlines() == [
        "Models    final.keras holds the weights after 6 steps, best.keras those of epoch 1, the "
        "best by val_accuracy",
        "Done: 6 steps in 1:01, best val_accuracy 0.7500 (epoch 1); 1 of 6 updates left out",
    ]
