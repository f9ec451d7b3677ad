"""Every callback that Keras ships, in a fit that is killed and goes on: as if nothing had been.

Each case is killed in mid-epoch, two steps after the newest checkpoint, or at an epoch's end.
"""

import inspect

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing import event_accumulator

import towers
from tests.parallel.fits import Fits, Interrupt, classifier, rows
from tests.resume import loaders

C = keras.callbacks
WEIGHTS = {0: 1.0, 1: 0.5, 2: 3.0}
KILLS = {"in mid-epoch": 7, "at an epoch's end": 4}  # epochs of 4 steps
# Keras makes a list of callbacks by itself; BackupAndRestore is refused, see below; OrbaxCheckpoint
# needs a package that the tests do not install. The other two are base classes.
LEFT_OUT = {"Callback", "CallbackList", "MonitorCallback", "BackupAndRestore", "OrbaxCheckpoint"}


def best_weights(directory):
    return C.ModelCheckpoint(
        f"{directory}/{{epoch}}-{{loss:.4f}}.weights.h5",
        "loss",
        save_best_only=True,
        save_weights_only=True,
    )


def writing(directory):
    """They also set the rate, and stop the fit after three epochs."""

    def write(epoch, logs):
        (directory / f"{epoch}.csv").write_text(repr(sorted(logs.items())))

    batches = f"{directory}/{{epoch}}-{{batch}}.weights.h5"
    return [
        C.LearningRateScheduler(lambda epoch, rate: rate * 0.7),
        C.ReduceLROnPlateau("loss", patience=1, min_delta=9.0, factor=0.5, cooldown=1),
        C.EarlyStopping("loss", patience=2, min_delta=9.0, restore_best_weights=True),
        C.CSVLogger(directory / "log.csv"),
        C.CSVLogger(directory / "log.txt", append=True, separator=";"),
        C.History(),
        C.LambdaCallback(on_epoch_end=write),
        C.ModelCheckpoint(batches, save_weights_only=True, save_freq=3),
        best_weights(directory),
        C.ProgbarLogger(),
        C.RemoteMonitor(path=f"{directory}/posts.csv", send_as_json=True),
        C.TensorBoard(directory, update_freq=1, write_graph=False),
    ]


# Each function takes the directory for what the callbacks write.
CASES = {
    "writing": writing,
    "averages": lambda directory: [C.SwapEMAWeights(), best_weights(directory)],
    "averages on epochs": lambda directory: [
        C.SwapEMAWeights(swap_on_epoch=True),
        best_weights(directory),
    ],
    "NaN": lambda directory: [
        C.LearningRateScheduler(lambda epoch, rate: 1e38 if epoch == 2 else rate),
        C.TerminateOnNaN(),
    ],
}


@pytest.fixture(scope="module")
def model():
    return classifier(optimizer=keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7))


@pytest.fixture(autouse=True)
def _posts(monkeypatch):
    """RemoteMonitor's server, which notes what it receives."""

    def post(url, json, **options):
        with open(url.removeprefix("http://localhost:9000"), "a", encoding="utf-8") as file:
            file.write(f"{sorted(json.items())}\n")

    monkeypatch.setattr("requests.post", post)


def written(directory):
    """What callbacks have written: of a curve each point once, of an HDF5 file the weights."""
    found = {}
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        name = str(path.relative_to(directory))
        if "tfevents" in name:
            events = event_accumulator.EventAccumulator(str(path), {"tensors": 0}).Reload()
            for tag in events.Tags()["tensors"]:
                points = {
                    (e.step, float(tf.make_ndarray(e.tensor_proto))) for e in events.Tensors(tag)
                }
                found.setdefault((path.parent.name, tag), set()).update(points)
        elif path.suffix == ".h5":
            with h5py.File(path) as file:
                file.visititems(
                    lambda part, value: found.update(
                        {(name, part): value[()].tobytes()}
                        if isinstance(value, h5py.Dataset)
                        else {}
                    )
                )
        else:
            found[name] = path.read_bytes()
    return found


@pytest.mark.filterwarnings("ignore:.*NaN", "ignore:invalid value")
@pytest.mark.telling("in mid-epoch-[!a]*")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kill", KILLS)
def test_every_callback_resumes_as_if_the_fit_had_not_been_killed(model, name, kill, tmp_path):
    def fit(folder, run):
        (tmp_path / folder).mkdir()
        fits = Fits(
            model,
            *rows(),
            callbacks=lambda: CASES[name](tmp_path / folder),
            epochs=4,
            shuffle=False,
            class_weight=WEIGHTS,
            validation_data=rows(5),
        )
        history, epochs, values = run(fits)
        return repr(sorted(history.items())), epochs, values, written(tmp_path / folder)

    whole = fit("whole", lambda fits: fits.plain())
    assert len(whole[1]) == (4 if "averages" in name else 3)
    again = fit("again", lambda fits: fits.interrupted(tmp_path / "backup", [KILLS[kill]], every=5))
    for part, expected in zip(again, whole, strict=True):
        assert part == expected


def test_every_callback_is_in_a_case(tmp_path):
    tried = {type(callback) for make in CASES.values() for callback in make(tmp_path)}
    shipped = {
        value
        for name, value in vars(C).items()
        if inspect.isclass(value) and issubclass(value, C.Callback) and name not in LEFT_OUT
    }
    assert tried == shipped


def test_averages_in_the_model_need_the_callback_that_put_them_there(model, tmp_path):
    fits = Fits(model, *rows(), callbacks=lambda: [C.SwapEMAWeights(swap_on_epoch=True)])
    with pytest.raises(InterruptedError):
        fits.fit(tmp_path, after=4, class_weight=WEIGHTS)
    for other in ([], [C.SwapEMAWeights()]):
        with pytest.raises(ValueError, match="callbacks lack SwapEMAWeights.swap_on_epoch=True."):
            Fits(model, *rows(), callbacks=lambda: other).fit(tmp_path, class_weight=WEIGHTS)


def test_backup_and_restore_beside_a_resume_is_an_error(model, tmp_path):
    fits = Fits(model, *rows(), callbacks=lambda: [C.BackupAndRestore(tmp_path / "theirs")])
    with pytest.raises(ValueError, match="^callbacks: .*Remove BackupAndRestore"):
        fits.fit(tmp_path / "ours")
    assert not list(tmp_path.iterdir())


def test_what_backup_and_restore_left_on_the_model_does_not_count(tmp_path):
    """Keras would begin each later fit of the model at the epoch of that one."""
    model, theirs = loaders.classifier(), tmp_path / "theirs"
    for _ in range(2):
        with pytest.raises(InterruptedError):
            model.fit(
                *rows(),
                batch_size=7,
                epochs=3,
                verbose=0,
                callbacks=[C.BackupAndRestore(theirs), Interrupt(6)],
            )
    assert Fits(model, *rows()).fit(tmp_path / "ours")[1] == [0, 1]


def test_callbacks_that_were_added_moved_or_removed_leave_the_others_what_they_know(
    model, tmp_path
):
    def stopping():
        return C.EarlyStopping("loss", patience=2, min_delta=9.0)

    first = Fits(model, *rows(), callbacks=lambda: [C.CSVLogger(tmp_path / "a.csv"), stopping()])
    with pytest.raises(InterruptedError):
        first.fit(tmp_path / "run", after=9, epochs=5, class_weight=WEIGHTS)
    others = [C.TerminateOnNaN(), stopping(), C.ReduceLROnPlateau("loss")]
    fits = Fits(model, *rows(), callbacks=lambda: others)
    assert fits.fit(tmp_path / "run", epochs=5, class_weight=WEIGHTS)[1] == [0, 1, 2]


def test_a_rate_that_callbacks_have_changed_is_no_edit(model, tmp_path):
    """A cell of a notebook that is run again, with the model as the interrupt has left it."""
    data = rows()
    model.optimizer.learning_rate = 0.1

    def fit(*callbacks):
        resume = towers.Resume(tmp_path)
        slower = C.LearningRateScheduler(lambda epoch, rate: rate / 2)
        return model.fit(
            *data,
            batch_size=7,
            epochs=3,
            verbose=0,
            class_weight=WEIGHTS,
            callbacks=[slower, resume, *callbacks],
        )

    with pytest.raises(InterruptedError):
        fit(Interrupt(5))
    np.testing.assert_allclose(fit().history["learning_rate"], [0.05, 0.025, 0.0125])
