"""What a user sees, on a terminal, in a pipe and in log.txt; lines of epochs and around them."""

import hashlib
import io
import math
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest

from towers.app.config import TrainConfig
from towers.app.reporting import report
from towers.app.reporting.report import Report
from towers.app.reporting.time_spent import TimeSpent
from towers.machine.user_lines import warn_user
from towers.resume.checkpointer import Found
from towers.resume.checkpoints import Checkpoint
from towers.app.monitor import Monitor
from towers.resume.train_state import TrainState

BAR = "Epoch  3/12  [======      ] 273/469  loss 0.0812"

WEIGHTS = f"; weights {hashlib.sha256().hexdigest()[:8]}"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.mark.parametrize(
    "tower_devices, options, expected",
    [
        (["/gpu:0"] * 2 + ["/gpu:1"], {"first": 4}, "/cpu:0; towers 4-5 on /gpu:0, 6 on /gpu:1"),
        (
            ["/gpu:0", "/gpu:1"],
            {"num_copies": 2},
            "/cpu:0 and 2 copies; towers 0-1 on /gpu:0, /gpu:1",
        ),
        (
            ["/gpu:0"],
            {"stages": 2},
            "/cpu:0; tower 0 on /gpu:0; each in 2 stages, on as many devices",
        ),
    ],
)
def test_the_devices_line_says_which_device_runs_which_towers(tower_devices, options, expected):
    line = report.devices_line("/cpu:0", tower_devices, **options)
    assert line == f"Devices   parameters on {expected}"


def test_a_pipe_gets_plain_lines_and_the_log_gets_the_same(tmp_path):
    stream = io.StringIO()
    out = Report(stream)
    out.log = tmp_path / "log.txt"
    out.line(report.labelled("Batch", "128 global"))
    out.warn(f"odd: {Path.cwd() / 'runs' / '001'}")
    out.waiting("a wait")
    out.ongoing(BAR)
    assert stream.getvalue().splitlines() == [
        "Batch     128 global",
        "Warning   odd: runs/001",
        BAR,
    ]
    assert (tmp_path / "log.txt").read_text() == stream.getvalue()


def test_a_terminal_gets_colour_and_a_bar_and_the_log_neither(terminal, tmp_path):
    out = Report(terminal)
    out.log = tmp_path / "log.txt"
    out.waiting("a wait")
    assert "a wait ..." in terminal.getvalue() and out.is_due()
    out.ongoing(BAR)
    out.warn("odd")
    out.line("             val_loss 0.0460  (best)")
    out.line("run: a:smile:[bold]b[/bold]")  # a name, and no markup
    shown = terminal.getvalue()
    for text in ("Epoch  3/12", "\x1b[33mWarning", "run: a:smile:[bold]b[/bold]\n"):
        assert text in shown
    assert "\x1b[?25l" in shown and "\x1b[?25h" not in shown  # no cursor
    out.close()
    assert "\x1b[?25h" in terminal.getvalue()
    log = (tmp_path / "log.txt").read_text()
    assert log.startswith("Warning   odd\n             val_loss 0.0460  (best)\nrun: a:smile:")


def test_the_bar_is_one_line_of_a_narrow_terminal_and_other_lines_stay_whole(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = Report(terminal)
    out.ongoing(BAR)
    command = "saved at step 1502. Resume: python train.py --resume=runs/cnn-mnist-001"
    out.line(command)
    assert "273/469" in terminal.getvalue() and "loss" not in terminal.getvalue()
    assert f"{command}\n" in terminal.getvalue()


def test_progress_in_a_pipe_is_due_only_every_ten_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    out = Report(io.StringIO())
    for show in (lambda: None, lambda: out.ongoing(BAR), out.close):
        show()
        now[0] += 9.9
        assert not out.is_due()
        now[0] += 0.2
        assert out.is_due()


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_reader_that_goes_away_ends_the_output_and_not_the_run(is_terminal, tmp_path):
    reading, writing = os.openpty() if is_terminal else os.pipe()
    os.close(reading)
    out = Report(os.fdopen(writing, "w"))
    out.log = tmp_path / "log.txt"
    out.line("one")
    out.ongoing(BAR)
    out.line("two")
    out.close()
    log = (tmp_path / "log.txt").read_text().splitlines()
    assert (log[0], log[-1]) == ("one", "two")


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize(
    "encoding, shown", [("ascii", r"run: \u65e5\udcff"), ("utf-8", r"run: 日\udcff")]
)
def test_what_a_stream_cannot_encode_is_replaced_and_all_lines_come(encoding, shown, is_terminal):
    stream = io.TextIOWrapper(io.BytesIO(), encoding, write_through=True)
    stream.isatty = lambda: is_terminal
    out = Report(stream)
    out.line("run: 日\udcff")  # of a name that is no UTF-8
    out.ongoing("日" * 100)  # wider than the terminal
    out.line("Done")
    written = stream.buffer.getvalue().decode(encoding)
    assert f"{shown}\n" in written and "Done\n" in written


def test_a_log_that_cannot_be_written_is_warned_of_once(tmp_path):
    stream = io.StringIO()
    out = Report(stream)
    out.log = tmp_path / "missing/log.txt"
    out.line("one")
    out.line("two")
    assert stream.getvalue().count("cannot be written any more") == 1
    assert stream.getvalue().splitlines()[-1] == "two"


def test_warnings_of_towers_are_lines_and_those_of_libraries_stay_where_they_are():
    stream = io.StringIO()
    with warnings.catch_warnings(record=True) as others:
        warnings.simplefilter("always")
        with Report(stream).show_warnings():
            warn_user("try verbosity=1")
            warnings.warn_explicit("old", DeprecationWarning, report.__file__, 1)
            warnings.warn("of a library", stacklevel=1)
    assert stream.getvalue() == "Warning   try --verbosity=1\n"
    assert [str(each.message) for each in others] == ["old", "of a library"]


@pytest.mark.parametrize(
    "shown, value, expected",
    [
        (report.format_seconds, 59.6, "1:00"),
        (report.format_seconds, 3723, "1:02:03"),
        (report.format_loss, 0.08123, "0.0812"),
        (report.format_loss, 3e-5, "3.000e-05"),  # a tiny loss does not look like zero
        (report.format_values, {"loss": 0.0812, "accuracy": 0.9763}, "loss 0.0812  accuracy 0.976"),
    ],
)
def test_a_number_is_shown_with_its_unit_and_few_digits(shown, value, expected):
    assert shown(value) == expected


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
        config=TrainConfig(**config),
        step=step,
        steps_an_epoch=4,
        monitor=Monitor(),
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


@pytest.mark.parametrize("patience, early", [(None, ""), (1, ", stopped early")])
def test_a_complete_run_says_whether_it_was_stopped_early(patience, early):
    history = {"val_accuracy": [0.75, 0.5]}
    train_state = TrainState(step=8, epoch=2, history=history, best_step=4, epochs_since_best=1)
    assert lines_of(report.describe_complete, run_of(8, early_stopping=patience), train_state) == [
        f"Already complete: 2 epochs{early}, best val_accuracy 0.7500 (epoch 1)"
    ]


@pytest.mark.parametrize(
    "step, saved, has_final, models, done",
    [
        (8, None, True, "final.keras holds the weights after 2 epochs", "Trained: 2 epochs"),
        (
            6,
            4,
            True,
            "final.keras holds the weights after 6 steps, best.keras holds the weights of "
            "epoch 1, the best by val_accuracy",
            "Done: 6 steps",
        ),
        (
            4,
            4,
            False,
            "final.keras is not written, best.keras holds the weights of epoch 1, the best "
            "by val_accuracy",
            "Trained: 1 epoch",
        ),
    ],
)
def test_the_end_says_which_file_holds_which_weights(step, saved, has_final, models, done):
    train_state = TrainState(step=step, best_step=4, epochs_since_best=1, best_saved=saved)
    assert lines_of(
        report.describe_end, run_of(100 + step), train_state, TimeSpent(61.0), has_final=has_final
    ) == [
        "Time      1:01: start and end 1:01 (100%)",
        f"Models    {models}",
        f"{done} in 1:01, best val_accuracy 0.7500 (epoch 1){WEIGHTS}",
    ]


@pytest.mark.parametrize(
    "values, best",
    [
        ([0.5, 0.75, 0.75], "best val_accuracy 0.7500 (epoch 2)"),
        ([math.nan, 0.5], "best val_accuracy 0.5000 (epoch 2)"),
        ([math.nan], "no finite val_accuracy"),
        ([], "no epoch is complete"),
    ],
)
def test_the_end_names_the_first_of_the_best_epochs_and_counts_what_was_left_out(values, best):
    train_state = TrainState(step=1500)
    done = lines_of(report.describe_end, run_of(1599, values), train_state, TimeSpent(61.0))[-1]
    assert done == f"Done: 375 epochs in 1:01, {best}; 1 of 1,500 updates left out{WEIGHTS}"
