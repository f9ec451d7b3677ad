"""Run directories behind a URL: a real S3 server, real processes, connections that are cut."""

import random
import re
import signal
import sys

import keras
import numpy as np
import pytest

import towers
from tests.app.run_test import config
from tests.resuming import FLAGS, fork, outcome, train, uninterrupted
from tests.s3 import Cable, Server
from towers.app import command_line
from towers.resume import checkpoints, remote_dir, remote_files, run_dir
from towers.machine import places

pytestmark = pytest.mark.light
URL = "s3://bucket/run"
FLAGS_THERE = [*FLAGS[:-1], f"--run_dir={URL}", "--checkpoint_every=3"]


@pytest.fixture(name="server", scope="module")
def _server():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    server = Server()
    yield server
    server.close()


@pytest.fixture(name="cable")
def _cable(server, monkeypatch, tmp_path):
    """What leads to an empty bucket; copies are made in tmp_path/tmp."""
    files = server.files()
    if files.find("bucket"):
        files.rm("bucket/run", recursive=True)
    cable = Cable(server.port)
    for name, value in server.environment(cable.port).items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield cable
    cable.close()


@pytest.fixture(name="memory")
def _memory(monkeypatch, tmp_path):
    """fsspec's files in this process' memory, empty."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = fsspec.filesystem("memory")
    files.store.clear()
    return files


def names(files, root="/run"):
    return [path.removeprefix(f"{root}/") for path in files.find(root)]


def copies(tmp_path):
    return list((tmp_path / "tmp").glob("towers-*"))


def outcome_there(server, tmp_path):
    server.files().get("bucket/run", str(tmp_path / "there"), recursive=True)
    return outcome(tmp_path / "there")


def resume(cwd, *flags, **given):
    return train(*FLAGS_THERE, "--resume=auto", *flags, cwd=cwd, **given)


def test_a_run_killed_amid_an_upload_and_cut_off_amid_another_ends_with_the_same_bits(
    server, cable, tmp_path
):
    """The first process ends before step 6 has its manifest; the second loses its connection."""
    process = fork(*FLAGS_THERE, cwd=tmp_path, fault="step == 7 and hold('killed')")
    cable.on_upload(b"epoch-1-step-6/manifest.json", process.kill)
    assert (process.communicate(100), process.returncode)[1] == -signal.SIGKILL
    there = names(server.files(), "bucket/run")
    assert "checkpoints/epoch-1-step-6/arrays.bin" in there
    assert "checkpoints/epoch-1-step-6/manifest.json" not in there
    (left,) = copies(tmp_path)
    assert (left / "run" / "checkpoints" / "epoch-1-step-6").is_dir()

    cable.on_upload(b"epoch-1-step-6/arrays.bin", lambda: cable.cut(2), after=2000)
    code, stdout, stderr = resume(tmp_path)
    assert (code, stderr, cable.num_cuts) == (0, "", 1), stdout
    assert "from step 4: " in stdout
    assert f"run: {URL}\n" in stdout
    found = re.search(
        r"Warning +s3://bucket/run: uploading checkpoints/epoch-1-step-6/arrays.bin took (\d+) "
        r"attempts in (\d) s, the last failure: .*\.\n", stdout,
    )
    assert found and int(found[1]) > 1 and 1 <= int(found[2]) < 6, stdout
    assert copies(tmp_path) == [left]
    assert outcome_there(server, tmp_path) == uninterrupted(*FLAGS)


@pytest.mark.matrix
def test_a_connection_lost_for_good_ends_the_run_and_names_the_copy_which_goes_on(
    server, cable, tmp_path, monkeypatch, capsys
):
    class Cut(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            cable.cut(1e9)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote_dir, "GIVE_UP_SECONDS", 1.0)
    with pytest.raises(places.LostDirectoryError) as caught:
        towers.train(config(run_dir=URL, epochs=1), [Cut()])
    (copy,) = copies(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"{URL} is no longer written: ")
    assert re.search(r"\(\d+ attempts? in \d+ s\)\. All", text)
    assert text.endswith(f"All that it lacks is in {copy}/run: go on with resume={copy}/run.")
    there = names(server.files(), "bucket/run")
    assert [name for name in there if "manifest" in name] == [
        "checkpoints/epoch-0-step-0/manifest.json"
    ]
    whole = towers.train(config(run_dir="whole"))
    assert towers.train(towers.TrainConfig(resume=f"{copy}/run", epochs=2)) == whole

    def fail():
        raise caught.value

    assert command_line.exit_code(fail) == 5
    assert capsys.readouterr().err == f"error: {text}\n".replace(f"{tmp_path}/", "")


@pytest.mark.matrix
@pytest.mark.parametrize("seed", range(3))
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(seed, server, cable, tmp_path):
    """Each moment is one of what it says to the server: listing, downloads, uploads, removals."""
    generator = random.Random(seed)
    flags = [*FLAGS[:-1], f"--run_dir={URL}", "--checkpoint_every=1", "--resume=auto"]
    for _ in range(8):
        process = fork(*flags, cwd=tmp_path)
        cable.on_block(generator.randrange(1, 60), process.kill)
        _, stderr = process.communicate(timeout=300)
        assert process.returncode == -signal.SIGKILL, stderr
    code, stdout, stderr = resume(tmp_path)
    assert (code, stderr) == (0, ""), stdout
    assert outcome_there(server, tmp_path) == uninterrupted(*FLAGS)


@pytest.mark.matrix
def test_ctrl_c_waits_for_the_upload_and_the_run_goes_on_elsewhere(server, cable, tmp_path):
    cable.delay = 0.01
    code, stdout, stderr = train(*FLAGS_THERE, cwd=tmp_path, fault="step == 6 and kill('INT')")
    assert code == 130, stderr
    assert f"saved at step 6. Resume: python train.py --resume={URL}\n" in stdout
    assert copies(tmp_path) == []
    code, stdout, stderr = train(f"--resume={URL}", cwd=tmp_path)
    assert (code, stderr) == (0, "") and "from step 6: " in stdout
    assert outcome_there(server, tmp_path) == uninterrupted(*FLAGS)


@pytest.mark.matrix
def test_a_bucket_that_is_not_there_is_one_line_before_step_1(cable, tmp_path):
    flags = [flag for flag in FLAGS_THERE if "run_dir" not in flag]
    code, _, stderr = train(*flags, "--run_dir=s3://elsewhere/run", cwd=tmp_path)
    assert code == 2
    assert stderr == (
        "error: --run_dir (s3://elsewhere/run) cannot be used: elsewhere does not exist.\n"
    )
    assert copies(tmp_path) == []


@pytest.mark.matrix
def test_a_server_that_never_answers_is_one_line(cable, tmp_path):
    cable.cut(1e9)
    code, _, stderr = resume(tmp_path)
    assert code == 2 and stderr.count("\n") == 1
    assert "--run_dir (s3://bucket/run) cannot be reached: " in stderr
    assert re.search(r"\(\d+ attempts? in \d+ s\)\.\n", stderr)


@pytest.mark.parametrize(("url", "said"), [
    ("gs://bucket/run", "needs a package that is missing (Please install gcsfs"),
    ("nowhere://bucket/run", "cannot be used: Protocol not known: nowhere."),
])
def test_a_url_that_nothing_here_reaches_is_refused_with_the_way_out(url, said, memory):
    if url.startswith("gs"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "gcsfs", None)
            with pytest.raises(ValueError) as error:
                towers.train(config(run_dir=url))
        assert "pip install 'tf-towers[remote]'" in str(error.value)
    else:
        with pytest.raises(ValueError) as error:
            towers.train(config(run_dir=url))
    assert str(error.value).startswith(f"run_dir ({url}) {said}")


def test_a_run_in_memory_goes_on_from_the_newest_good_checkpoint(memory, tmp_path, capsys):
    url = "memory://run"
    history = towers.train(config(run_dir=url, checkpoint_every=1))
    kept = {name.split("/")[1] for name in names(memory) if name.endswith("manifest.json")}
    assert kept == {"epoch-1-step-4", "epoch-1-step-6", "epoch-1-step-7", "epoch-2-step-8"}
    with pytest.raises(ValueError, match=f"holds a run. To continue it: resume={url};"):
        towers.train(config(run_dir=url))
    before = {name: memory.cat(f"/run/{name}") for name in names(memory)}
    assert towers.train(towers.TrainConfig(resume=url)) == history
    assert "Already complete" in capsys.readouterr().out
    with pytest.raises(ValueError, match="cannot change seed"):
        towers.train(towers.TrainConfig(resume=url, seed=1))
    changed = {name for name in before if memory.cat(f"/run/{name}") != before[name]}
    assert changed == {"log.txt", "checkpoints/lock"}

    memory.pipe("/run/checkpoints/epoch-2-step-8/arrays.bin", b"damaged")
    memory.rm("/run/final.keras")
    assert towers.train(towers.TrainConfig(resume=url)) == history
    out = capsys.readouterr().out
    assert "epoch-2-step-8 is damaged" in out and "from step 7" in out
    assert memory.cat("/run/final.keras") and memory.size(
        "/run/checkpoints/epoch-2-step-8/arrays.bin") > 7
    assert list(tmp_path.glob("towers-*")) == []


def test_a_run_that_cannot_go_on_changes_nothing(memory, tmp_path):
    url = "memory://run"
    towers.train(config(run_dir=url, epochs=1))
    edited = memory.cat("/run/config.json").replace(b'"seed": 0', b'"seed": 1')
    memory.pipe("/run/config.json", edited)
    before = {name: memory.cat(f"/run/{name}") for name in names(memory)}
    with pytest.raises(ValueError) as error:
        towers.train(towers.TrainConfig(resume=url))
    assert str(error.value).startswith(
        f"{url}/checkpoints/epoch-1-step-4 belongs to another run than config.json beside it: seed"
    )
    assert {name: memory.cat(f"/run/{name}") for name in names(memory)} == before
    assert list(tmp_path.glob("towers-*")) == []


def test_the_process_that_has_begun_last_is_the_one_that_writes(memory, tmp_path):
    class Steal(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            memory.pipe("/run/checkpoints/lock", b"process 7 on another, 1")

    with pytest.raises(places.LostDirectoryError, match="process 7 on another trains there now"):
        towers.train(config(run_dir="memory://run"), [Steal()])
    assert not any("epoch-1" in name or "epoch-2" in name for name in names(memory))
    (copy,) = tmp_path.glob("towers-*/run")
    assert (copy / "checkpoints" / "epoch-1-step-4").is_dir()


def test_a_file_url_is_an_ordinary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert not remote_files.is_remote(f"file://{tmp_path}/run")
    towers.train(config(run_dir=f"file://{tmp_path}/run", epochs=1))
    assert checkpoints.find(tmp_path / "run" / run_dir.CHECKPOINTS)
    assert towers.train(towers.TrainConfig(resume=f"file://{tmp_path}/run"))


def test_a_fit_goes_on_from_memory(memory, tmp_path):
    def fit(callbacks=(), directory="memory://run"):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        parallel = towers.make_parallel(model, gpus=2)
        parallel.compile("adam", "mse")
        x = np.arange(60, dtype="float32").reshape(20, 3)
        parallel.fit(
            x, x[:, :2], batch_size=4, epochs=2, verbose=0,
            callbacks=[towers.Resume(directory, every=2), *callbacks],
        )
        return [weight.numpy().tolist() for weight in model.weights]

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                raise OSError("failed")

    with pytest.raises(OSError, match="failed"):
        fit([Fail()])
    assert "checkpoints/epoch-0-step-2/manifest.json" in names(memory)
    assert fit() == fit(directory="whole")
    assert list(tmp_path.glob("towers-*")) == []
