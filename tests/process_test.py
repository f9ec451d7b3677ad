"""What becomes of a run when what is around it fails: its output, files, disk and memory."""

import csv

import keras
import pytest
import tensorflow as tf

import towers
from tests.app.run_test import config
from tests.mounts import NAMESPACE, READ_ONLY, SMALL_DISK, skip_where_nothing_can_be_mounted
from tests.resuming import FLAGS, outcome, resumed, start, train, uninterrupted
from towers.resume import checkpoints, run_dir
from towers.app.config import TrainConfig
from towers.machine.places import LostDirectoryError

SHORT = (*FLAGS, "--max_steps=2")


@pytest.fixture(name="mount", scope="module")
def _mount(tmp_path_factory):
    skip_where_nothing_can_be_mounted(tmp_path_factory.mktemp("mount"))


@pytest.mark.matrix
def test_a_run_whose_reader_goes_away_trains_to_its_end(tmp_path):
    """As in `python train.py | head -1`."""
    process = start(*SHORT, cwd=tmp_path)
    assert process.stdout.readline().startswith("towers ")
    process.stdout.close()
    _, stderr = process.communicate(timeout=500)
    assert process.returncode == 0 and "Error" not in stderr
    assert outcome(tmp_path / "run")["position"]["step"] == 2


@pytest.mark.matrix
def test_a_run_without_stdout_trains_to_its_end(tmp_path):
    code, _, stderr = train(*SHORT, cwd=tmp_path, inside=("sh", "-c", 'exec "$@" >&-', "sh"))
    assert (code, stderr) == (0, "")
    assert outcome(tmp_path / "run")["position"]["step"] == 2


@pytest.mark.matrix
def test_a_read_only_directory_is_refused_before_step_1(mount, tmp_path):
    inside = (*NAMESPACE, READ_ONLY, "sh")
    code, _, stderr = train(*SHORT, cwd=tmp_path, inside=inside, fault="kill('KILL')")
    assert code == 2 and list(tmp_path.iterdir()) == []
    assert stderr == (
        "error: --run_dir (run) cannot be used: Read-only file system: run. Name a directory that "
        "you can write to.\n"
    )


@pytest.mark.matrix
def test_a_run_outlives_a_full_disk_and_goes_on_from_what_was_saved_before(mount, tmp_path):
    """It is full from the fifth step on; when there is room again, the last epoch is repeated."""
    fault = "step == 5 and os.system('cat /dev/zero > filler 2> /dev/null')"
    flags = [*FLAGS, "--checkpoint_every=2"]
    code, stdout, stderr = train(
        *flags, cwd=tmp_path, fault=fault, inside=(*NAMESPACE, SMALL_DISK, "sh")
    )
    assert (code, stderr) == (5, (
        "error: run/final.keras cannot be written (No space left on device). Make room, then "
        "continue the run: python train.py --resume=run.\n"
    ))
    for path in ("checkpoints/epoch-1-step-6", "results.csv"):
        assert f"run/{path} cannot be written (No space left on device); " in stdout
    path, _, wrong = checkpoints.read_newest(tmp_path / "run" / "checkpoints")
    assert (path.name, wrong) == ("epoch-1-step-4", [])
    assert resumed(tmp_path) == uninterrupted(*FLAGS)


class Harm(keras.callbacks.Callback):
    """Puts a directory in the place of a file."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            self.path.unlink(missing_ok=True)
            self.path.mkdir()


@pytest.mark.parametrize("name", [run_dir.RESULTS, run_dir.LOG])
def test_a_file_that_cannot_be_written_is_a_warning(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    history = towers.train(config(run_dir="run"), [Harm(tmp_path / "run" / name)])
    assert len(history["loss"]) == 2
    assert f"run/{name} cannot be written" in capsys.readouterr().out
    if name != run_dir.RESULTS:
        with open("run/results.csv", encoding="utf-8") as file:
            assert len(list(csv.DictReader(file))) == 2


@pytest.mark.parametrize("name, error, models", [
    (run_dir.FINAL, "run/final.keras cannot be written .*what it held before is intact",
     "final.keras is not written, best.keras holds the weights of epoch 1, the best by loss"),
    (run_dir.BEST, "run/best.keras does not hold the weights of the best epoch",
     "final.keras holds the weights after 2 epochs"),
])
def test_a_model_that_is_not_in_its_file_is_an_error_until_a_resume_has_written_it(
    name, error, models, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    first_is_best = {"monitor": "loss", "monitor_mode": "max"}
    path = tmp_path / "run" / name
    with pytest.raises(LostDirectoryError, match=f"{error}. .*--resume=.*run"):
        towers.train(config(run_dir="run", **first_is_best), [Harm(path)])
    said = capsys.readouterr().out
    assert f"Models    {models}\nTrained: 2 epochs" in said
    path.rmdir()
    history = towers.train(TrainConfig(resume="run"))
    assert len(history["loss"]) == 2 and "Done: 2 epochs" in capsys.readouterr().out
    for file, iterations in [("best.keras", 4), ("final.keras", 8)]:
        model = keras.saving.load_model(tmp_path / "run" / file)
        assert int(model.optimizer.iterations) == iterations


def greedy_model(input_shape, num_classes):
    """Asks for more than 2^56 bytes an example: more than an address can name."""
    class Greedy(keras.layers.Layer):
        def call(self, x):
            return x + tf.reduce_max(tf.tile(tf.stop_gradient(x), [1, 2**54]))

    return keras.Sequential([
        keras.Input(input_shape), Greedy(), keras.layers.Dense(num_classes, activation="softmax")
    ])


@pytest.mark.matrix
def test_too_little_memory_names_the_per_tower_batch(tmp_path, monkeypatch):
    """TensorFlow waits 10 s for each allocation that fails, in case that memory becomes free."""
    monkeypatch.chdir(tmp_path)
    greedy = {"model": "tests.process_test:greedy_model"}
    message = "too little memory for 8 examples a tower.*smaller `batch_size` than 16, .*towers=4"
    with pytest.raises(ValueError, match=message) as error:
        towers.train(config(run_dir="run", num_gpus=1, num_towers=2, **greedy))
    assert isinstance(error.value.__cause__, tf.errors.ResourceExhaustedError)
    assert [path.name for path in checkpoints.find(tmp_path / "run" / "checkpoints")] == [
        "epoch-0-step-0"
    ]


@pytest.mark.matrix
def test_too_little_memory_on_two_devices_is_named_too(tmp_path):
    """TensorFlow often reports the cancelled transfer instead; its messages in the log tell."""
    code, stdout, stderr = train(
        "--model=tests.process_test:greedy_model", "--dataset=tests.app.run_test:small_data",
        "--num_gpus=2", "--batch_size=16", "--device=cpu", "--run_dir=run", cwd=tmp_path, anew=True,
    )
    assert code == 2, stdout + stderr
    assert "error: a device has too little memory for 8 examples a tower" in stderr
