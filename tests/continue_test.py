"""TrainConfig(resume=...): what goes on, what is refused, and what callbacks remember."""

import csv
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.app import run_test
from tests.app.run_test import config
from tests.results import COLUMNS
from towers.resume import checkpoints, run_dir
from towers.app.continued import continued_config
from towers.app.config import TrainConfig

RUN = run_dir.Path("run")


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Interrupt(keras.callbacks.Callback):
    """Ctrl-C, at the end of one of all the run's batches."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == self.step:
            raise KeyboardInterrupt


STILL = {"learning_rate": 1e-30, "optimizer": "sgd"}  # nothing changes: the first epoch stays best


def interrupted(step=6, callbacks=(), **values):
    with pytest.raises(KeyboardInterrupt):
        towers.train(config(run_dir="run", **values), [*callbacks, Interrupt(step)])


def files():
    return {
        str(p): p.read_bytes() for p in RUN.rglob("*") if p.is_file() and p.name != run_dir.LOCK
    }


def refused(message, **values):
    before = files()
    with pytest.raises(ValueError, match=message):
        towers.train(TrainConfig(resume="run", **values))
    assert files() == before


def test_the_history_and_the_final_model_are_those_of_an_uninterrupted_run():
    whole = towers.train(config(run_dir="whole", epochs=3))
    interrupted(epochs=3)
    assert towers.train(TrainConfig(resume="run")) == whole
    a, b = (keras.saving.load_model(f"{name}/final.keras") for name in ("run", "whole"))
    for x, y in zip(a.weights, b.weights, strict=True):
        np.testing.assert_array_equal(x.numpy(), y.numpy())


def test_one_script_begins_a_run_and_goes_on_with_it():
    whole = towers.train(config(run_dir="whole", epochs=3))
    with pytest.raises(ValueError, match="resume=auto goes on with the run in `run_dir`.*name one"):
        towers.train(config(resume="auto"))
    interrupted(epochs=3, resume="auto")
    assert json.loads((RUN / "config.json").read_text())["resume"] is None
    assert towers.train(config(run_dir="run", epochs=3, resume="auto")) == whole
    with pytest.raises(ValueError, match="cannot change optimizer"):
        towers.train(config(run_dir="run", epochs=3, resume="auto", optimizer="sgd"))


@pytest.mark.matrix
def test_a_run_of_before_there_were_other_tasks_goes_on():
    """Its rows are lists without names, and nothing tells a monitor's mode or callbacks."""
    whole = towers.train(config(run_dir="whole"))
    interrupted(monitor="val_accuracy")
    settings = json.loads((RUN / "config.json").read_text())
    path, checkpoint, _ = checkpoints.read_newest(RUN / "checkpoints")
    for field in ("monitor_mode", "callbacks"):
        del settings[field], checkpoint.state["config"][field]
    (RUN / "config.json").write_text(json.dumps(settings))
    (row,) = checkpoint.state["position"]["results"]
    assert row[:5] == [1, *(whole[name][0] for name in COLUMNS)] and len(row) == 7
    shutil.rmtree(RUN / "checkpoints")
    (RUN / "checkpoints").mkdir()
    checkpoints.write(path, checkpoint)
    assert towers.train(TrainConfig(resume="run")) == whole


def test_a_complete_run_says_so_wherever_it_has_been_moved(capsys):
    whole = towers.train(config(run_dir="whole"))
    shutil.move("whole", RUN)
    before = files()
    assert towers.train(TrainConfig(resume="run")) == whole
    assert "Already complete: 2 epochs, best val_accuracy" in capsys.readouterr().out
    after = files()
    assert after.pop("run/log.txt").startswith(before.pop("run/log.txt"))
    assert after == before


@pytest.mark.telling("first0")
@pytest.mark.parametrize("first", [{"max_steps": 6, "epochs": 4}, {"epochs": 2}])
def test_a_run_that_has_ended_goes_on_to_a_larger_limit_as_if_it_had_not(first):
    whole = towers.train(config(run_dir="whole", epochs=4, max_steps=15))
    limits = {"epochs": 4, "max_steps": 15}
    towers.train(config(run_dir="run", **{"max_steps": 8, **first}))
    larger = {k: v for k, v in limits.items() if first.get(k) != v}
    assert towers.train(TrainConfig(resume="run", **larger)) == whole
    with open("run/results.csv", encoding="utf-8") as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["1", "2", "3", "4"]


@pytest.mark.telling("limit0")
@pytest.mark.parametrize("limit", [{"epochs": 2}, {"max_steps": 7}, {"max_steps": 6}])
def test_a_run_goes_on_to_a_smaller_limit_as_if_it_had_been_given_first(limit):
    whole = towers.train(config(run_dir="whole", **{"epochs": 4, **limit}))
    interrupted(epochs=4)
    assert towers.train(TrainConfig(resume="run", **limit)) == whole
    for name in ("results.csv", "final.keras"):
        assert (RUN / name).exists()
    assert json.loads((RUN / "config.json").read_text()).items() >= limit.items()
    refused("epochs.* is reached already: the run has done ", epochs=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 8}, r"cannot change batch_size \(8, the run has 16\): it would be"),
        ({"seed": 1, "num_towers": 3}, r"num_towers \(3, the run has 2\), seed \(1, the run"),
        ({"epochs": 1}, r"epochs \(1\) is reached already: the run has done 6 steps, and is left"),
        ({"max_steps": 5}, r"max_steps \(5\) is reached already: the run has done 6 steps"),
        ({"epochs": 1, "max_steps": 9, "seed": 2}, r"change seed .* other `epochs`, `max_steps`, "),
        ({"model": "cnn_"}, r" model \(cnn_, "),
        ({"optimizer": "sgd"}, r" optimizer \(sgd, the run has None\)"),
        ({"early_stopping": 3}, r" early_stopping \(3, the run has None\)"),
        ({"plan": True}, r" plan \(True, "),
        ({"run_dir": "other"}, None),
    ],
)
def test_what_would_be_another_run_is_refused_with_the_differences(values, message):
    interrupted()
    if message is None:
        with pytest.raises(ValueError, match=r" run_dir \(other, the run"):
            continued_config("run", values)
    else:
        refused(message, **values)


def test_flags_that_ask_once_are_not_done_again(capsys):
    interrupted(verify_gradients=True)
    capsys.readouterr()
    towers.train(TrainConfig(resume="run"))
    assert "Verify" not in capsys.readouterr().out


def test_other_devices_have_other_numbers():
    text = TrainConfig(device="auto", num_gpus=4, logical_gpus=8).to_json()
    run_dir.create("run", "n", text)
    same = continued_config("run", {"checkpoint_every": 5})
    assert (same.num_gpus, same.logical_gpus) == (4, 8)
    moved = continued_config("run", {"device": "cpu"})
    assert (moved.num_gpus, moved.logical_gpus) == (None, None)
    assert continued_config("run", {"device": "gpu", "logical_gpus": 2}).logical_gpus == 2
    assert continued_config("run", {"logical_gpus": 2}).num_gpus == 4


def test_a_directory_without_a_run_is_refused():
    with pytest.raises(ValueError, match=r"resume \(nowhere\) holds no run that can go on"):
        towers.train(TrainConfig(resume="nowhere"))


def test_changed_data_are_refused(monkeypatch):
    interrupted()
    (x, y), test = run_test.small_data()
    monkeypatch.setattr(run_test, "small_data", lambda: ((x + 1, y), test))
    refused("the train data are not those that .*/run/checkpoints/epoch-1-step-6 was trained on")


def test_data_that_have_moved_are_named_beside_resume_and_others_are_refused(tmp_path, monkeypatch):
    """The run has a relative data_dir, and goes on from another working directory."""
    (x, y), (x_test, y_test) = run_test.small_data()
    for name, labels in (("data", y), ("other", y[::-1])):
        np.savez(f"{name}.npz", x_train=x, y_train=labels, x_test=x_test, y_test=y_test)
    values = {"dataset": "npz", "data_dir": "data.npz", "epochs": 3}
    whole = towers.train(config(run_dir="whole", **values))
    interrupted(**values)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    with pytest.raises(ValueError, match=r"data_dir \(data.npz\).* does not exist.* `resume`"):
        towers.train(TrainConfig(resume="../run"))
    with pytest.raises(ValueError, match="the train data are not those"):
        towers.train(TrainConfig(resume="../run", data_dir="../other.npz"))
    (tmp_path / "data.npz").rename(tmp_path / "elsewhere" / "moved.npz")
    assert towers.train(TrainConfig(resume="../run", data_dir="moved.npz")) == whole
    assert json.loads((tmp_path / "run/config.json").read_text())["data_dir"] == "moved.npz"


def test_another_model_is_refused_with_the_first_variable_that_differs(monkeypatch):
    interrupted()

    def wider(input_shape, num_classes):
        return keras.Sequential([
            keras.Input(input_shape),
            keras.layers.Dense(9, name="wide"),
            keras.layers.Dense(num_classes, activation="softmax"),
        ])

    monkeypatch.setattr(run_test, "small_model", wider)
    refused(r"another model: here .*wide/kernel is float32 \[3, 9\], in the .*kernel .*\[3, 8\]")


def test_an_edited_configuration_is_refused():
    interrupted()
    path = RUN / run_dir.CONFIG
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 5'))
    refused(r"belongs to another run than config.json beside it: seed \(0 then, 5 now\)")


def test_damage_falls_back_and_says_so_and_all_damaged_is_refused(capsys):
    whole = towers.train(config(run_dir="whole"))
    interrupted()
    newest, *older = checkpoints.find(RUN / "checkpoints")
    (newest / "arrays.bin").write_bytes(b"")
    shutil.copytree(RUN, "copy")
    assert towers.train(TrainConfig(resume="run")) == whole
    out = capsys.readouterr().out
    assert "step-6 is damaged: arrays.bin has 0 bytes instead of" in out
    assert "from step 4: run/checkpoints/epoch-1-step-4" in out
    shutil.rmtree(RUN)
    shutil.move("copy", RUN)
    for path in older:
        (RUN / "checkpoints" / path.name / "manifest.json").unlink()
    refused("no checkpoint is good: ")


def test_lost_checkpoints_are_no_reason_to_start_again():
    interrupted()
    shutil.rmtree(RUN / "checkpoints")
    refused("holds no checkpoint, and .*/run holds results")


@pytest.mark.matrix
def test_a_run_killed_before_its_first_checkpoint_begins_at_step_0(capsys):
    whole = towers.train(config(run_dir="whole"))
    run_dir.create("run", "n", (run_dir.Path("whole") / "config.json").read_text())
    assert towers.train(TrainConfig(resume="run")) == whole
    assert "no checkpoint yet: from step 0" in capsys.readouterr().out


def test_a_run_whose_first_checkpoint_cannot_be_written_does_not_begin(monkeypatch):
    def refuse(path, checkpoint):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(checkpoints, "write", refuse)
    monkeypatch.setattr(towers.TowerStep, "train_batch", lambda *a: pytest.fail("trained"))
    with pytest.raises(ValueError, match=r"run_dir \(.*/run\): no checkpoint .*: .*Read-only"):
        towers.train(config(run_dir="run"))
    assert not RUN.exists()


def test_a_full_disk_in_mid_run_does_not_end_it(monkeypatch, capsys):
    write = checkpoints.write

    def refuse(path, checkpoint):
        if checkpoints.step_of(path):
            raise OSError(28, "No space left on device")
        write(path, checkpoint)

    monkeypatch.setattr(checkpoints, "write", refuse)
    assert len(towers.train(config(run_dir="run"))["loss"]) == 2
    assert "epoch-1-step-4 cannot be written (No space left on device)" in capsys.readouterr().out
    assert [p.name for p in checkpoints.find(RUN / "checkpoints")] == ["epoch-0-step-0"]


def test_a_callbacks_error_leaves_the_state_saved_and_is_raised_as_it_is(capsys):
    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise LookupError("mine")

    whole = towers.train(config(run_dir="whole"))
    with pytest.raises(LookupError, match="mine"):
        towers.train(config(run_dir="run"), [Fail()])
    assert "saved at step 4. Resume: python train.py --resume=run" in capsys.readouterr().out
    assert towers.train(TrainConfig(resume="run")) == whole


class StopsIn(keras.callbacks.Callback):
    """Ctrl-C in the second epoch: in its middle, in its validation or at its end."""

    def __init__(self, moment):
        super().__init__()
        self.moment, self.epoch = moment, None

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.stop(epoch == 2, "end")

    def on_train_batch_end(self, batch, logs=None):
        self.stop((self.epoch, batch) == (1, 1), "middle")

    def on_test_batch_begin(self, batch, logs=None):
        self.stop((self.epoch, batch) == (1, 1), "validation")

    def stop(self, is_now, moment):
        if is_now and moment == self.moment:
            raise KeyboardInterrupt


@pytest.mark.parametrize("moment", ["middle", "validation", "end"])
def test_keras_callbacks_remember_what_they_have_seen(moment):
    def callbacks():
        return [
            keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=9.0, factor=0.5),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.EarlyStopping("val_loss", patience=4, min_delta=9.0),
            keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
            keras.callbacks.CSVLogger("log.csv"),
        ]

    def rows_and_weights(name):
        model = keras.saving.load_model(f"{name}/final.keras")
        return run_dir.Path("log.csv").read_text(), [w.numpy().tolist() for w in model.weights]

    whole = towers.train(config(run_dir="whole", epochs=9, ema=0.6), callbacks())
    expected = rows_and_weights("whole")
    assert len(whole["loss"]) == 5
    with pytest.raises(KeyboardInterrupt):
        towers.train(
            config(run_dir="run", epochs=9, ema=0.6), [*callbacks(), StopsIn(moment)]
        )
    assert towers.train(TrainConfig(resume="run"), callbacks()) == whole
    assert rows_and_weights("run") == expected


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swapped_averages_are_kerass_and_a_longer_run_goes_on_from_the_weights(swap_on_epoch):
    """One batch an epoch, so that the order of examples does not matter."""
    def model():
        keras.utils.set_random_seed(1)
        made = run_test.small_model((3,), 3)
        optimizer = keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.6)
        made.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
        return made

    train, test = run_test.small_data()

    def run(name, epochs):
        given = TrainConfig(
            run_dir=name, resume="auto", num_gpus=2, batch_size=50, epochs=epochs
        )
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)
        history = towers.train(given, [swap], model=model(), train=train, test=test)
        return history, keras.saving.load_model(f"{name}/final.keras").get_weights()

    plain = model()
    theirs = plain.fit(
        *train, batch_size=50, epochs=3, validation_data=test, verbose=0,
        callbacks=[keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)],
    ).history
    ours, weights = run("whole", 3)
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-5)
    for a, b in zip(weights, plain.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    run("run", 2)
    longer, again = run("run", 3)
    assert longer == ours
    for a, b in zip(again, weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_optimizer_that_a_script_compiles_otherwise_is_refused():
    def run(rate, **values):
        model = run_test.small_model((3,), 3)
        model.compile(keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
        train, test = run_test.small_data()
        return towers.train(
            TrainConfig(run_dir="run", num_gpus=2, epochs=1, **values), model=model, train=train,
            test=test,
        )

    history = run(0.1)
    assert run(0.1, resume="auto") == history
    with pytest.raises(ValueError, match=r"another run: optimizer.learning_rate \(0.1 then, 0.2"):
        run(0.2, resume="auto")


def test_a_users_callback_takes_part_with_get_state_and_set_state():
    class Count(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.count = 0

        def on_train_batch_end(self, batch, logs=None):
            self.count += 1

        def get_state(self):
            return self.count

        def set_state(self, state):
            self.count = state

    interrupted(6, [Count()])
    again = Count()
    towers.train(TrainConfig(resume="run"), [again])
    assert again.count == 8


@pytest.mark.matrix
def test_the_best_weights_of_early_stopping_are_restored_at_the_end():
    """By the monitored value the first epoch is the best, long before the interruption."""
    def callbacks():
        return [
            keras.callbacks.EarlyStopping(
                "val_loss", patience=3, min_delta=9.0, restore_best_weights=True
            )
        ]

    towers.train(config(run_dir="first", epochs=1))
    interrupted(10, callbacks(), epochs=9)
    assert len(towers.train(TrainConfig(resume="run"), callbacks())["loss"]) == 4
    run, first = (keras.saving.load_model(f"{name}/final.keras") for name in ("run", "first"))
    for a, b in zip(run.weights, first.weights, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


@pytest.mark.matrix
def test_a_callbacks_state_that_is_no_json_is_a_warning_and_the_run_is_saved_without_it(capsys):
    class Odd(keras.callbacks.Callback):
        def get_state(self):
            return object() if int(self.model.optimizer.iterations) else None

        def set_state(self, state):
            raise AssertionError(state)

    interrupted(6, [Odd()])
    assert "callback Odd: get_state() returned what is no JSON" in capsys.readouterr().out
    again = towers.train(TrainConfig(resume="run"), [Odd()])
    assert "callback Odd begins anew" in capsys.readouterr().out
    assert again == towers.train(config(run_dir="whole"))


@pytest.mark.parametrize("monitor", ["val_loss", "val_accuracy"])
def test_early_stopping_ends_the_run_after_epochs_without_a_better_one(monitor):
    still = {**STILL, "epochs": 9, "early_stopping": 2}
    assert len(towers.train(config(run_dir="run", monitor=monitor, **still))["loss"]) == 3
    state = checkpoints.read_newest(RUN / "checkpoints")[1].state
    assert state["position"]["best_step"] == 4
    before = files()
    assert len(towers.train(TrainConfig(resume="run", epochs=20))["loss"]) == 3
    assert {**files(), "run/log.txt": None} == {**before, "run/log.txt": None}


@pytest.mark.matrix
def test_a_run_that_early_stopping_has_ended_goes_on_with_a_larger_one():
    whole = towers.train(config(run_dir="whole", epochs=9, early_stopping=4, **STILL))
    towers.train(config(run_dir="run", epochs=9, early_stopping=2, **STILL))
    assert towers.train(TrainConfig(resume="run", early_stopping=4)) == whole
    assert len(whole["loss"]) == 5
    refused(r"cannot change early_stopping \(3, the run has 4\)", early_stopping=3)


def test_each_epochs_end_is_saved_so_that_the_best_ones_state_is_kept():
    towers.train(config(run_dir="run", epochs=4, checkpoint_every=3, **STILL))
    names = [path.name for path in checkpoints.find(RUN / "checkpoints")]
    assert names == ["epoch-4-step-16", "epoch-3-step-15", "epoch-3-step-12", "epoch-1-step-4"]


def test_checkpoints_may_come_at_other_steps_after_resuming():
    whole = towers.train(config(run_dir="whole"))
    interrupted(5)
    assert towers.train(TrainConfig(resume="run", checkpoint_every=1)) == whole
    names = [path.name for path in checkpoints.find(RUN / "checkpoints")]
    assert names == ["epoch-2-step-8", "epoch-1-step-7", "epoch-1-step-6", "epoch-1-step-4"]
    assert json.loads((RUN / "config.json").read_text())["checkpoint_every"] == 1


def failing_model(input_shape, num_classes):
    """An operation in its graph fails on one of the examples."""
    largest = run_test.small_data()[0][0].max()

    class Check(keras.layers.Layer):
        def call(self, x):
            tf.debugging.Assert(tf.reduce_all(x < largest), ["too large"])
            return x

    return keras.Sequential([
        keras.Input(input_shape), Check(), keras.layers.Dense(num_classes, activation="softmax")
    ])


def test_an_error_inside_a_step_leaves_the_checkpoint_before_it(capsys):
    failing = {"model": "tests.continue_test:failing_model", "num_gpus": 1, "num_towers": 2}
    with pytest.raises(ValueError, match="^step [0-9]: .*too large.*labels and weights of this b"):
        towers.train(config(run_dir="run", checkpoint_every=1, **failing))
    (path, *_) = checkpoints.find(RUN / "checkpoints")
    said = f"the last checkpoint is that of step {checkpoints.step_of(path)}. Resume: "
    assert said in capsys.readouterr().out
    assert checkpoints.is_good(path)


def test_the_best_epoch_is_the_monitored_ones():
    history = towers.train(config(run_dir="run", epochs=4, monitor="val_loss"))
    best = int(np.argmin(history["val_loss"]))
    position = checkpoints.read_newest(RUN / "checkpoints")[1].state["position"]
    assert position["best_step"] == 4 * (best + 1)
    assert position["best"] == -history["val_loss"][best]


def test_config_json_keeps_a_larger_limit():
    interrupted()
    towers.train(TrainConfig(resume="run", epochs=3))
    saved = json.loads((RUN / "config.json").read_text())
    assert (saved["epochs"], saved["resume"]) == (3, None)


def test_a_callback_that_fails_before_the_first_step_leaves_no_half_checkpoint():
    class Fail(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            raise LookupError("mine")

    whole = towers.train(config(run_dir="whole"))
    with pytest.raises(LookupError, match="mine"):
        towers.train(config(run_dir="run"), [Fail()])
    assert checkpoints.find(RUN / "checkpoints") == []
    assert towers.train(TrainConfig(resume="run")) == whole


@pytest.mark.matrix
def test_a_run_interrupted_in_its_validation_goes_on_with_it(monkeypatch):
    whole = towers.train(config(run_dir="whole"))
    test_batch = towers.TowerStep.test_batch
    calls = []

    def interrupt_the_second(self, x, y, **placed):
        calls.append(x)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return test_batch(self, x, y, **placed)

    with monkeypatch.context() as patch:
        patch.setattr(towers.TowerStep, "test_batch", interrupt_the_second)
        with pytest.raises(KeyboardInterrupt):
            towers.train(config(run_dir="run"))
    assert [p.name for p in checkpoints.find(RUN / "checkpoints")][0] == "epoch-0-step-4"
    assert towers.train(TrainConfig(resume="run")) == whole


@pytest.mark.matrix
def test_a_run_may_go_on_with_other_stages():
    options = {"num_towers": 2, "epochs": 3, "model": "mlp", "dataset": "mnist", "max_steps": 4,
               "batch_size": 64}
    whole = towers.train(config(run_dir="whole", **options))
    interrupted(step=2, gpus_per_tower=2, **{**options, "num_gpus": 4})
    assert towers.train(TrainConfig(resume="run", num_gpus=8, gpus_per_tower=4)) == whole
