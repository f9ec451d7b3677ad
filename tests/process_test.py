"""What becomes of a run when what is around it fails: its output, files, disk and memory."""

import keras
import pytest
import tensorflow as tf

import towers
from tests.app.run_test import config
from tests.processes import NAMESPACE, READ_ONLY, SMALL_DISK, skip_where_nothing_can_be_mounted
from tests.resuming import FLAGS, outcome, resumed, start, train, uninterrupted
from towers.resume import checkpoints, run_dir
from towers.app.config import TrainConfig
from towers.machine.places import LostDirectoryError

SHORT = (*FLAGS, "--max_steps=2")


@pytest.fixture(name="mount", scope="module")
def _mount(tmp_path_factory):
    skip_where_nothing_can_be_mounted(tmp_path_factory.mktemp("mount"))


@pytest.mark.matrix
def test_a_run_trains_to_its_end_when_its_reader_goes_away_and_without_stdout(tmp_path):
    """As in `python train.py | head -1`, and in `python train.py >&-`."""
    (tmp_path / "closed").mkdir()
    process = start(*SHORT, cwd=tmp_path)
    assert process.stdout.readline().startswith("towers ")
    process.stdout.close()
    _, stderr = process.communicate(timeout=500)
    assert process.returncode == 0 and "Error" not in stderr
    closed = ("sh", "-c", 'exec "$@" >&-', "sh")
    code, _, stderr = train(*SHORT, cwd=tmp_path / "closed", inside=closed)
    assert (code, stderr) == (0, "")
    for cwd in (tmp_path, tmp_path / "closed"):
        assert outcome(cwd / "run")["position"]["step"] == 2


@pytest.mark.matrix
def test_a_read_only_directory_is_refused_before_step_1(mount, tmp_path):
    inside = (*NAMESPACE, READ_ONLY, "sh")
    code, _, stderr = train(*SHORT, cwd=tmp_path, inside=inside, fault="kill('KILL')")
    assert code == 2 and list(tmp_path.iterdir()) == []
    assert stderr.startswith("error: --run_dir (run) cannot be used: Read-only file system: ")
    assert stderr.count("\n") == 1 and "Name a directory that you can write to" in stderr


@pytest.mark.matrix
def test_a_run_outlives_a_full_disk_and_goes_on_from_what_was_saved_before(mount, tmp_path):
    """It is full from the fifth step on; when there is room again, the last epoch is repeated."""
    fault = "step == 5 and os.system('cat /dev/zero > filler 2> /dev/null')"
    flags = [*FLAGS, "--checkpoint_every=2"]
    code, stdout, stderr = train(
        *flags, cwd=tmp_path, fault=fault, inside=(*NAMESPACE, SMALL_DISK, "sh")
    )
    assert code == 5 and stderr.startswith("error: run/final.keras cannot be written (No space ")
    assert stderr.endswith("continue the run: python train.py --resume=run.\n")
    for path in ("checkpoints/epoch-1-step-6", "results.csv"):
        assert f"run/{path} cannot be written (No space left on device); " in stdout
    path, _, wrong = checkpoints.read_newest(tmp_path / "run" / "checkpoints")
    assert (path.name, wrong) == ("epoch-1-step-4", [])
    assert resumed(tmp_path) == uninterrupted(*FLAGS)


class Harm(keras.callbacks.Callback):
    """Puts directories in the place of files."""

    def __init__(self, *paths):
        super().__init__()
        self.paths = paths

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0:
            for path in self.paths:
                path.unlink(missing_ok=True)
                path.mkdir()


def test_a_table_a_log_and_a_chart_that_cannot_be_written_are_warnings(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    names = "results.csv", "log.txt", "results.png"
    history = towers.train(config(run_dir="run"), [Harm(*(tmp_path / "run" / n for n in names))])
    assert len(history["loss"]) == 2
    said = capsys.readouterr().out
    assert all(f"run/{name} cannot be written" in said for name in names[:2])
    assert "Warning   results.png cannot be drawn (IsADirectoryError: " in said


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
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_too_little_memory_names_the_per_tower_batch(num_gpus, tmp_path):
    """TensorFlow waits 10 s for each allocation that fails, in case that memory becomes free.

    On two devices it often reports the cancelled transfer instead; its messages in the log tell.
    """
    code, stdout, stderr = train(
        "--model=tests.process_test:greedy_model", "--dataset=tests.app.run_test:small_data",
        f"--num_gpus={num_gpus}", "--num_towers=2", "--batch_size=16", "--device=cpu",
        "--run_dir=run", cwd=tmp_path, anew=True,
    )
    assert code == 2, stdout + stderr
    assert "error: a device has too little memory for 8 examples a tower" in stderr
    assert "smaller --batch_size than 16" in stderr and "--num_towers=4" in stderr
    assert [path.name for path in checkpoints.find(tmp_path / "run" / "checkpoints")] == [
        "epoch-0-step-0"
    ]
