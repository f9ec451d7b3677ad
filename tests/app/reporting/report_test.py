"""What a user sees, on a terminal, in a pipe and in log.txt."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from towers.app.reporting import outcome, report
from towers.app.reporting.report import Progress, Report

PROGRESS = Progress(3, 12, 273, 469, {"loss": 0.0812, "accuracy": 0.9763}, 3912.3, 41.2)
VALIDATION = {"val_loss": 0.046, "val_accuracy": 0.985}
EIGHT_GPUS = [f"/gpu:{i}" for i in range(8)]


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
    ("tower_devices", "expected"),
    [
        (["/gpu:0"], "tower 0 on /gpu:0"),
        (["/gpu:0"] * 3, "towers 0-2 on /gpu:0"),
        (["/gpu:0", "/gpu:1"], "towers 0-1 on /gpu:0, /gpu:1"),
        (EIGHT_GPUS, "towers 0-7 on /gpu:0 ... /gpu:7"),
        (["/gpu:0"] * 2 + ["/gpu:1"] * 2, "towers 0-3 on /gpu:0, /gpu:1 (2 each)"),
        (["/gpu:0"] * 2 + ["/gpu:1"], "towers 0-1 on /gpu:0, 2 on /gpu:1"),
    ],
)
def test_the_devices_line_says_which_device_runs_which_towers(tower_devices, expected):
    line = report.devices_line("/cpu:0", tower_devices)
    assert line.plain == f"Devices   parameters on /cpu:0; {expected}"


@pytest.mark.parametrize(
    ("batch_size", "num_towers", "num_examples", "expected"),
    [
        (128, 8, 60000, "128 global = 8 towers x 16; 469 steps an epoch (last: 96 = 8 x 12)"),
        (100, 8, 60000, "100 global = 8 towers x 12-13; 600 steps an epoch"),
        (7, 3, 8, "7 global = 3 towers x 2-3; 2 steps an epoch (last: 1 = 3 x 0-1)"),
        (16, 1, 16, "16 global = 1 tower x 16; 1 step an epoch"),
        (1024, 2, 10, "1,024 global = 2 towers x 512; 1 step an epoch (last: 10 = 2 x 5)"),
    ],
)
def test_the_batch_line_gives_the_true_split(batch_size, num_towers, num_examples, expected):
    line = report.batch_line(batch_size, num_towers, num_examples)
    assert line.plain == f"Batch     {expected}"


def test_only_an_unusual_split_is_warned_of():
    assert report.split_warning(128, 8) is None
    assert "smaller than the 8 towers: 5 without an example" in str(report.split_warning(3, 8))
    assert "wait" in str(report.split_warning(100, 8))


def test_the_other_lines_have_the_documented_form():
    versions = {"towers": "0.1.0", "TensorFlow": "2.21.0", "Keras": "3.15.1"}
    title = report.title_line(versions, "run: runs/cnn-mnist-001")
    model = report.model_line("cnn", 1199882, "adam", 0.0010000000474974513, 0, "float32")
    half = report.model_line("cnn", 10, "sgd", 0.1, 7, "mixed_bfloat16")
    assert title.plain == (
        "towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: runs/cnn-mnist-001"
    )
    assert report.data_line("mine", 60, None).plain == "Data      mine: 60 train, no test examples"
    assert report.task_line(["loss", "mae"], ["optimizer", "learning_rate"]).plain == (
        "Task      the model's own, as it was compiled: loss, mae; but optimizer and learning_rate "
        "as given beside it"
    )
    assert report.data_line("mnist", 60000, 10000).plain == (
        "Data      mnist: 60,000 train, 10,000 test"
    )
    assert model.plain == "Model     cnn, 1,199,882 parameters; adam, learning rate 0.001; seed 0"
    assert half.plain.endswith("; sgd, learning rate 0.1; seed 7; mixed_bfloat16")
    assert report.progress_line(PROGRESS).plain == (
        "Epoch  3/12  loss 0.0812  accuracy 0.976 | 3,912 examples/s | 0:41 left"
    )
    assert report.validation_line(VALIDATION, True, 13).plain == (
        "             val_loss 0.0460  val_accuracy 0.985  (best)"
    )


def test_a_pipe_gets_plain_lines_and_the_log_gets_the_same(tmp_path):
    stream = io.StringIO()
    out = Report(stream)
    out.open_log(tmp_path / "log.txt")
    out.line(report.labelled("Batch", "128 global"))
    out.warn("odd")
    out.progress(PROGRESS)
    out.end_epoch(PROGRESS._replace(seconds_left=None), VALIDATION, True)
    assert stream.getvalue().splitlines() == [
        "Batch     128 global",
        "Warning   odd",
        "Epoch  3/12  step 273/469  loss 0.0812  accuracy 0.976 | 3,912 examples/s | 0:41 left",
        "Epoch  3/12  loss 0.0812  accuracy 0.976 | 3,912 examples/s",
        "             val_loss 0.0460  val_accuracy 0.985  (best)",
    ]
    assert (tmp_path / "log.txt").read_text() == stream.getvalue()


def test_a_terminal_gets_colour_and_a_bar_and_the_log_neither(terminal, tmp_path):
    out = Report(terminal)
    out.open_log(tmp_path / "log.txt")
    out.progress(PROGRESS)
    out.end_epoch(PROGRESS, VALIDATION, True)
    out.close()
    assert "\x1b[32m======" in terminal.getvalue()
    assert "\x1b" not in (tmp_path / "log.txt").read_text()
    assert (tmp_path / "log.txt").read_text().startswith("Epoch  3/12  loss 0.0812")


@pytest.mark.parametrize(("width", "expected"), [
    (120, "Epoch  3/12  [======      ]  58%  step 273/469  loss 0.0812  accuracy 0.976 | "
          "3,912 examples/s | 0:41 left"),
    (90, "Epoch  3/12  [======      ]  58%  step 273/469  loss 0.0812  accuracy 0.976 | 0:41 left"),
    (80, "Epoch  3/12  58%  step 273/469  loss 0.0812  accuracy 0.976 | 0:41 left"),
])
def test_the_bar_has_share_and_step_and_as_much_more_as_the_terminal_is_wide(width, expected):
    line = report.moving_line(PROGRESS, width)
    assert line.plain == expected
    assert len(report.moving_line(PROGRESS._replace(step=9), width)) == len(line)  # it stands still


def test_a_terminal_breaks_lines_between_words_and_never_a_command(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = Report(terminal)
    out.line(report.labelled("Models", "final.keras holds the weights after 60 steps", style=""))
    out.line(outcome.stopped_line(Path("runs/cnn-mnist-001"), 1502, True))
    assert terminal.getvalue().splitlines() == [
        "Models    final.keras holds the weights",
        "          after 60 steps",
        "saved at step 1502. Resume: python train.py --resume=runs/cnn-mnist-001",
    ]


def test_a_terminal_shows_how_long_one_waits_until_there_is_progress(terminal, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    out = Report(terminal)
    out.waiting("Epoch  1/12  preparing the first step")
    now[0] += 3
    out.line("Warning")  # comes above
    for _ in range(500):
        if "first step ... 0:03" in terminal.getvalue().split("Warning")[1]:
            break
        time.sleep(0.01)
    else:
        pytest.fail("no second moves")
    assert out.is_due()
    out.progress(PROGRESS)
    assert "step 273/469" in terminal.getvalue()
    now[0] += 3
    time.sleep(0.6)  # the wait is over: nothing writes any more
    assert "0:06" not in terminal.getvalue()
    out.close()


def test_closing_gives_the_terminal_its_cursor_back(terminal):
    out = Report(terminal)
    out.progress(PROGRESS)
    assert "\x1b[?25l" in terminal.getvalue() and "\x1b[?25h" not in terminal.getvalue()
    out.close()
    assert "\x1b[?25h" in terminal.getvalue()


@pytest.mark.parametrize("name", ["runs/[bold]x[/bold]", "a:smile:b"])
def test_names_are_shown_as_they_are(terminal, name):
    Report(terminal).line(name)
    assert name in terminal.getvalue()


def test_progress_in_a_pipe_is_due_only_every_ten_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(report.time, "monotonic", lambda: now[0])
    out = Report(io.StringIO())
    now[0] += 9.9
    assert not out.is_due()
    now[0] += 0.2
    assert out.is_due()
    out.progress(PROGRESS)
    assert not out.is_due()


def test_a_reader_that_goes_away_ends_the_output_and_not_the_run(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    out = Report(os.fdopen(writing, "w"))
    out.open_log(tmp_path / "log.txt")
    out.line("one")
    out.progress(PROGRESS)
    out.end_epoch(PROGRESS, VALIDATION, False)
    out.close()
    assert (tmp_path / "log.txt").read_text().splitlines()[0] == "one"


@pytest.mark.parametrize("encoding, shown", [
    ("ascii", r"run: \u65e5\udcff"), ("latin1", r"run: \u65e5\udcff"), ("utf-8", r"run: 日\udcff"),
])
def test_what_a_stream_cannot_encode_is_replaced_and_all_lines_come(encoding, shown):
    stream = io.TextIOWrapper(io.BytesIO(), encoding)
    out = Report(stream)
    out.line("run: 日\udcff")  # of a name that is no UTF-8
    out.line("Done")
    assert stream.buffer.getvalue().decode(encoding).splitlines() == [shown, "Done"]


def test_a_terminal_that_cannot_encode_a_name_shows_every_line(terminal, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # fewer than the progress takes
    stream = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(stream, "isatty", terminal.isatty, raising=False)
    out = Report(stream)
    out.line("run: 日")
    out.progress(PROGRESS)
    out.line("Done")
    shown = stream.buffer.getvalue()
    assert rb"run: \u65e5" in shown and b"Epoch  3/12" in shown and b"Done" in shown


@pytest.mark.matrix
def test_python_ends_well_after_nobody_reads_stdout_any_more():
    code = "import sys; sys.stdin.read(); from towers.app.reporting.report import Report; "
    code += "out = Report(); out.line('one'); out.line('two'); print('three')"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(report.__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 0
    assert "BrokenPipe" not in process.stderr.read()


def test_a_log_that_cannot_be_written_is_warned_of_once(tmp_path):
    stream = io.StringIO()
    out = Report(stream)
    out.open_log(tmp_path / "missing" / "log.txt")
    out.line("one")
    out.line("two")
    assert stream.getvalue().count("cannot be written any more") == 1
    assert stream.getvalue().splitlines()[-1] == "two"
