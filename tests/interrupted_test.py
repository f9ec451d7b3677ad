"""A run of towers.train, or a fit with towers.Resume, resumes to the same bits after an interrupt.

A user runs the script again to resume it. Here it is a function, or a process that is killed.
"""

import functools
import os
import signal
import sys
from pathlib import Path

import keras
import pytest

import towers
from tests import processes
from tests.entry_points import ENTRY_POINTS, Script
from tests.parallel.fits import STEPS
from towers.app import run_dir
from towers.resume import checkpoints, directories

pytestmark = pytest.mark.usefixtures("without_charts")
C, L = keras.callbacks, keras.layers


def averaged():
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.6)


@pytest.fixture(params=ENTRY_POINTS)
def entry(request):
    return ENTRY_POINTS[request.param]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Maps an entry point to the outcome of a run without interruption, which is computed once."""
    return functools.cache(lambda entry: entry.run(tmp_path_factory.mktemp("whole") / "run"))


def interrupted(entry, directory, after, **options):
    """Interrupts a run after each of these numbers of steps; returns the outcome of its end."""
    for steps in after:
        with pytest.raises(InterruptedError):
            entry.run(directory, after=steps, **options)
    return entry.run(directory, **options)


def output(capsys, recwarn):
    return capsys.readouterr().out + "".join(str(w.message) for w in recwarn.list)


@pytest.mark.matrix
@pytest.mark.parametrize("after", range(STEPS))
def test_a_run_interrupted_at_any_step_resumes_to_the_same_bits(
    entry, after, uninterrupted, tmp_path
):
    assert interrupted(entry, tmp_path / "run", [after]) == uninterrupted(entry)


@pytest.mark.telling("fit")
def test_a_run_interrupted_several_times_resumes_to_the_same_bits(entry, uninterrupted, tmp_path):
    """The run has Dropout, BatchNorm, Adam with a schedule, shuffling and an uneven last batch."""
    history, _ = outcome = interrupted(entry, tmp_path / "run", [2, 3, 2], every=3)
    assert outcome == uninterrupted(entry)
    assert len(history["val_loss"]) == 2


def kill_in_the_middle_of_a_save():
    replace = os.replace

    def replace_or_die(old, new):
        if "epoch-" in str(new):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(old, new)

    os.replace = replace_or_die


@pytest.mark.telling("fit")
def test_a_killed_process_resumes_on_any_devices_to_the_same_bits(entry, uninterrupted, tmp_path):
    name = next(name for name, other in ENTRY_POINTS.items() if other is entry)
    killed = processes.run("-m", "tests.interrupted_test", name, tmp_path / "run")
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert entry.run(tmp_path / "run") == uninterrupted(entry)


class InValidation(C.Callback):
    """Interrupts the validation of an epoch of this process."""

    def __init__(self, epoch=0):
        super().__init__()
        self.left = epoch

    def on_test_begin(self, logs=None):
        self.left -= 1

    def on_test_batch_begin(self, batch, logs=None):
        if self.left < 0:
            raise InterruptedError


class TimeLimit(C.Callback):
    """Stops the training after so many steps of this process, like the end of a job's time."""

    def __init__(self, left):
        super().__init__()
        self.left = left

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            self.model.stop_training = True

    def get_state(self):
        return None

    def set_state(self, state):
        """Begins again in each process."""


@pytest.mark.telling("fit")
def test_a_run_that_a_callback_stops_goes_on_at_the_next_start(entry, uninterrupted, tmp_path):
    """In mid-epoch, at the end of an epoch, and if the validation after it is interrupted, too."""

    def stopped(after, *others):
        return entry.run(tmp_path / "run", callbacks=lambda: [TimeLimit(after), *others])

    assert len(stopped(2)[0]["loss"]) == 1
    assert len(stopped(2)[0]["loss"]) == 1  # of 4 steps
    with pytest.raises(InterruptedError):
        stopped(1, InValidation())
    assert len(stopped(1)[0]["loss"]) == 2
    assert entry.run(tmp_path / "run") == uninterrupted(entry)


class OwnStop(C.EarlyStopping):
    """Also has a state of its own."""

    def get_state(self):
        return [self.wait, self.best]

    def set_state(self, state):
        self.wait, self.best = state


@pytest.mark.telling("fit")
def test_a_run_that_early_stopping_has_ended_is_complete(entry, tmp_path, capsys):
    """It stays so with more epochs; a larger patience lets it go on."""

    def run(patience, epochs):
        early = OwnStop("loss", min_delta=9.0, patience=patience)
        return entry.run(tmp_path / "run", callbacks=lambda: [early], epochs=epochs)

    first = run(1, 5)
    assert len(first[0]["loss"]) == 2
    assert run(1, 6) == first
    said = capsys.readouterr().out
    assert "Already complete: 2 epochs, stopped early, " in said
    assert len(run(2, 6)[0]["loss"]) == 3


class Count(C.Callback):
    """A user's callback that counts steps."""

    count = 0

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1

    def on_epoch_end(self, epoch, logs=None):
        logs["seen"] = self.count

    def get_state(self):
        return self.count

    def set_state(self, state):
        self.count = state


@pytest.mark.matrix
def test_callbacks_resume_with_their_state(entry, tmp_path):
    """They change the learning rate, average weights, stop early and restore the best weights."""
    script = Script(averaged, plain=True)

    def run(name, after=()):
        def callbacks():
            return [
                Count(),
                C.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
                C.ReduceLROnPlateau("accuracy", factor=0.5, patience=1, min_delta=1.0, mode="max"),
                C.SwapEMAWeights(swap_on_epoch=True),
                C.CSVLogger(tmp_path / f"{name}.csv"),
                C.EarlyStopping(
                    "accuracy", patience=2, min_delta=1.0, mode="max", restore_best_weights=True
                ),
            ]

        if name == "cut":
            with pytest.raises(InterruptedError):
                cut = {"callbacks": lambda: [*callbacks(), InValidation(1)]}
                entry.run(tmp_path / name, script, epochs=9, **cut)
        options = {"script": script, "callbacks": callbacks, "epochs": 9}
        outcome = interrupted(entry, tmp_path / name, after, **options)
        return outcome, (tmp_path / f"{name}.csv").read_text()

    whole = run("whole")
    assert len(whole[0][0]["loss"]) == len(whole[0][0]["seen"]) == 3
    assert run("cut", after=[3]) == whole


@pytest.mark.telling("fit-True")
@pytest.mark.parametrize("swap_on_epoch", [None, True])
def test_a_complete_run_returns_its_history_and_resumes_with_more_epochs(
    entry, swap_on_epoch, tmp_path, capsys
):
    """It resumes from the weights, because Keras discards the averages after the last epoch."""

    def run(name, **options):
        def callbacks():
            return [] if swap_on_epoch is None else [C.SwapEMAWeights(swap_on_epoch)]

        return entry.run(tmp_path / name, Script(averaged), callbacks=callbacks, **options)

    longer = run("long", epochs=3)
    first = run("run")
    assert "Already complete" not in capsys.readouterr().out
    assert run("run", after=0) == first  # no step is repeated
    assert "Already complete: 2 epochs, " in capsys.readouterr().out
    assert run("run", epochs=3) == longer


@pytest.mark.telling("fit-SIGTERM")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_saves_after_the_step_and_ends_the_run(
    entry, name, uninterrupted, tmp_path, capsys
):
    number = getattr(signal, name)
    received, before = [], signal.getsignal(number)
    if number != signal.SIGINT:
        signal.signal(number, lambda *_: received.append(number))
    try:
        with pytest.raises(KeyboardInterrupt):
            entry.run(
                tmp_path / "run", after=2, call=lambda: os.kill(os.getpid(), number), every=1000
            )
    finally:
        signal.signal(number, before)
    assert received == [number] * (number != signal.SIGINT)
    assert "saved at step 3" in capsys.readouterr().out
    assert entry.run(tmp_path / "run") == uninterrupted(entry)


# Damaged checkpoints and full disks


@pytest.mark.telling("fit")
def test_a_damaged_checkpoint_is_reported_and_the_previous_one_used(
    entry, uninterrupted, tmp_path, capsys, recwarn
):
    with pytest.raises(InterruptedError):
        entry.run(tmp_path / "run", after=6)
    newest, *older = checkpoints.find(tmp_path / "run/checkpoints")
    (newest / checkpoints.ARRAYS).write_bytes(bytes(4))
    assert entry.run(tmp_path / "run") == uninterrupted(entry)
    text = output(capsys, recwarn)
    assert f"{newest.name} is damaged: arrays.bin has 4 bytes instead of" in text
    for path in checkpoints.find(tmp_path / "run/checkpoints"):
        (path / checkpoints.MANIFEST).unlink()
    with pytest.raises(ValueError, match="no checkpoint is good: "):
        entry.run(tmp_path / "run", epochs=3)


@pytest.mark.telling("train-0", "fit-1")
@pytest.mark.parametrize("first_step", [0, 1])
def test_a_first_checkpoint_that_cannot_be_written_is_an_error_and_a_later_one_a_warning(
    entry, first_step, tmp_path, monkeypatch, capsys, recwarn
):
    write = checkpoints.write

    def full(path, checkpoint):
        if checkpoints.step_of(path) >= first_step:
            raise OSError(28, "No space left on device")
        write(path, checkpoint)

    monkeypatch.setattr(checkpoints, "write", full)
    if first_step == 0:
        with pytest.raises(ValueError, match="no checkpoint can be written: .*No space left"):
            entry.run(tmp_path / "run")
        assert not (tmp_path / "run" / run_dir.CONFIG).exists()
        return
    history, _ = entry.run(tmp_path / "run")
    assert len(history["loss"]) == 2
    assert "epoch-1-step-4 cannot be written (No space left on device)" in output(capsys, recwarn)
    found = checkpoints.find(tmp_path / "run/checkpoints")
    assert [path.name for path in found] == ["epoch-0-step-0"]


# Errors


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Maps an entry point to the directory of an interrupted run."""

    @functools.cache
    def begin(entry):
        directory = tmp_path_factory.mktemp("begun") / "run"
        with pytest.raises(InterruptedError):
            entry.run(directory, after=0)
        return directory

    return begin


def files(directory):
    return {p: p.read_bytes() for p in directory.rglob("*") if p.is_file() and p.name != "lock"}


def constant():
    return keras.optimizers.Adam(0.1)


OTHER_RATE = (
    r"another \w+: optimizer.learning_rate \(CosineDecay then, 0.1 now\).*LearningRateSched"
)
OTHER_MODEL = r"holds another model: here \S*kernel is float32 \[6, 7\], in the .*\[6, 5\]"


@pytest.mark.telling("*-units*", "train-shift*", "fit-constant*")
@pytest.mark.parametrize(
    "script, words",
    [
        (Script(units=7), OTHER_MODEL),
        (Script(shift=1.0), "another fit: data|the train data are not those that .*step-0 was"),
        (Script(constant), OTHER_RATE),
        (Script(keras.optimizers.SGD), r"another \w+: optimizer"),
    ],
    ids=["units", "shift", "constant", "SGD"],
)
def test_an_edited_script_is_an_error_that_names_the_difference(entry, script, words, begun):
    directory = begun(entry)
    before = files(directory)
    with pytest.raises(ValueError, match=words) as caught:
        entry.run(directory, script)
    assert "\n" not in str(caught.value)
    assert files(directory) == before


def test_a_directory_in_use_is_an_error(entry, begun):
    with directories.locked(begun(entry)):
        with pytest.raises(ValueError, match=f"is in use: process {os.getpid()}"):
            entry.run(begun(entry))


def _main(name, directory):
    """python -m tests.interrupted_test ENTRY_POINT DIRECTORY: killed, on 3 devices."""
    towers.logical_cpus(8, num_towers=2)
    run = ENTRY_POINTS[name].run
    run(Path(directory), every=2, after=5, call=kill_in_the_middle_of_a_save, num_gpus=3)


if __name__ == "__main__":
    _main(*sys.argv[1:])
