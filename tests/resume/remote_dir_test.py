"""Run directories behind a URL: a real S3 server and real processes, or fsspec's memory."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import keras
import pytest

import towers
from tests.app.run_test import config
from tests.bits import bits
from tests.parallel.fits import rows
from tests.resume import loaders
from tests.resuming import outcome, train
from towers.app import command_line
from towers.machine import places
from towers.resume import directories, remote_dir

pytestmark = pytest.mark.usefixtures("without_charts")
S3, MEMORY = "s3://bucket/run", "memory://run"
FLAGS = (  # those of `config`
    "--model=tests.app.run_test:small_model --dataset=tests.app.run_test:small_data --num_gpus=2 "
    f"--batch_size=16 --epochs=2 --checkpoint_every=3 --run_dir={S3} --resume=auto"
).split()


class Server:
    """moto's S3 in a process of its own, with one bucket, `bucket`; `environment` leads there."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
        self._url = f"http://127.0.0.1:{port}"
        self.environment = {
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_ENDPOINT_URL": self._url,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError):
                request = urllib.request.Request(f"{self._url}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                return
            assert time.monotonic() < until and self._process.poll() is None
            time.sleep(0.05)

    def files(self):
        """The file system, as another client sees it."""
        s3fs = pytest.importorskip("s3fs")
        return s3fs.S3FileSystem(
            key="test",
            secret="test",
            endpoint_url=self._url,
            use_listings_cache=False,
            skip_instance_cache=True,
        )

    def close(self):
        self._process.kill()
        self._process.wait()


def kill_before(end):
    """This process is killed before its first upload of a file whose name ends so."""
    from fsspec.implementations.dirfs import DirFileSystem

    put_file = DirFileSystem.put_file

    def put_or_die(self, local, name):
        if name.endswith(end):
            os.kill(os.getpid(), signal.SIGKILL)
        put_file(self, local, name)

    DirFileSystem.put_file = put_or_die


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("s3fs")
    pytest.importorskip("moto")
    server = Server()
    yield server
    server.close()


@pytest.fixture
def bucket(server, monkeypatch, tmp_path):
    """The files of an empty bucket; copies are made in tmp_path/tmp."""
    files = server.files()
    if files.find("bucket"):
        files.rm("bucket/run", recursive=True)
    for name, value in {**server.environment, "TMPDIR": str(tmp_path / "tmp")}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    return files


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """fsspec's files in this process' memory, empty."""
    fsspec = pytest.importorskip("fsspec")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = fsspec.filesystem("memory")
    files.store.clear()
    return files


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run in memory that nobody has interrupted: a copy of its directory, and its history."""
    files = pytest.importorskip("fsspec").filesystem("memory")
    history = towers.train(config(run_dir=MEMORY, checkpoint_every=1))
    copy = tmp_path_factory.mktemp("whole") / "run"
    files.get("/run", str(copy), recursive=True)
    return copy, history


def contents(memory):
    return {path.removeprefix("/run/"): memory.cat(path) for path in memory.find("/run")}


def copies(tmp_path):
    return list(tmp_path.glob("towers-*"))


def at_epoch_end(act):
    return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: act(epoch))


@pytest.mark.telling("6/manifest.json")
@pytest.mark.parametrize(
    "end", ["6/manifest.json", "json", "6/arrays.bin", "final.keras", "complete"]
)
def test_a_run_killed_before_an_upload_resumes_to_the_same_bits(
    end, whole, bucket, tmp_path, capsys
):
    here = f"__import__({__name__!r}, fromlist=['kill_before'])"
    fault = f"step == 1 and {here}.kill_before({end!r})"
    assert train(*FLAGS, cwd=tmp_path, fault=fault)[0] == -9
    if end == "6/manifest.json":
        assert len(bucket.find("bucket/run/checkpoints/epoch-1-step-6")) == 1
    (left,) = copies(tmp_path / "tmp")
    towers.train(config(run_dir=S3, checkpoint_every=3, resume="auto"))
    said = capsys.readouterr().out
    assert f"run: {S3}\n" in said and ("6/" not in end or "from step 4: " in said)
    bucket.get("bucket/run", str(tmp_path / "there"), recursive=True)
    assert copies(tmp_path / "tmp") == [left]
    assert outcome(tmp_path / "there") == outcome(whole[0])


def test_names_of_remote_files_lead_out_of_no_copy(memory, tmp_path):
    """A bucket may hold keys with "..", which a disk takes for the folder above."""
    mirror = remote_dir.Mirror(MEMORY, "run_dir", tmp_path / "parent")
    names = ["config.json", "checkpoints/epoch-0-step-1/manifest.json"]
    for name in [*names, "../../epoch-0-step-2/manifest.json", "../other.json", "a/../../b.json"]:
        directories.open_remote(MEMORY).pipe_file(name, b"{}")
    found = mirror.names()
    assert not any(".." in name for name in found) and set(names) <= {*found}
    mirror.download(found)
    outside = {path.name for path in tmp_path.rglob("*")} - {"parent", "tmp"}
    assert "epoch-0-step-2" not in outside and "other.json" not in {*os.listdir(tmp_path)}


@pytest.mark.parametrize(
    "url, words",
    [
        ("s3://elsewhere/run", "bucket does not exist"),
        ("gs://bucket/run", r"gcsfs.* pip install 'tf-towers\[remote\]'"),
        ("nowhere://bucket/run", "Protocol not known: nowhere."),
    ],
)
def test_a_url_that_cannot_be_used_is_an_error(url, words, bucket, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(ValueError, match=rf"^run_dir \({url}\) cannot be used: .*{words}"):
        towers.train(config(run_dir=url))
    assert copies(tmp_path / "tmp") == []


def test_a_run_resumes_from_the_newest_good_checkpoint(whole, memory, tmp_path, capsys):
    copy, history = whole
    for path in filter(Path.is_file, copy.rglob("*")):
        memory.pipe(f"/run/{path.relative_to(copy)}", path.read_bytes())
    kept = {name.split("/")[1] for name in contents(memory) if name.endswith("manifest.json")}
    assert kept == {"epoch-1-step-6", "epoch-1-step-7", "epoch-2-step-8"}  # epoch 2 is the best
    before = contents(memory)
    with pytest.raises(ValueError, match=f"holds a run. To continue it: resume={MEMORY};"):
        towers.train(config(run_dir=MEMORY))
    assert towers.train(towers.TrainConfig(resume=MEMORY, trust_run_dir=True)) == history
    assert "Already complete" in capsys.readouterr().out
    name, text = "/run/config.json", memory.cat("/run/config.json")
    memory.pipe(name, text.replace(b'ed": 0', b'ed": 1'))
    with pytest.raises(ValueError, match=f"^{MEMORY}/checkpoints/epoch-2-step-8 belongs to anoth"):
        towers.train(towers.TrainConfig(resume=MEMORY, trust_run_dir=True))
    memory.pipe(name, text)
    after = contents(memory)
    assert {name for name in before if after[name] != before[name]} == {
        "log.txt",
        "checkpoints/lock",
    }
    memory.pipe("/run/checkpoints/epoch-2-step-8/arrays.bin", b"damaged")
    memory.rm("/run/final.keras")
    assert towers.train(towers.TrainConfig(resume=MEMORY, trust_run_dir=True)) == history
    out = capsys.readouterr().out
    assert "epoch-2-step-8 is damaged" in out and "from step 7" in out
    assert contents(memory)["final.keras"] and copies(tmp_path) == []
    assert len(contents(memory)["checkpoints/epoch-2-step-8/arrays.bin"]) > 7


def test_files_are_uploaded_later_or_stay_in_the_copy(whole, memory, tmp_path, monkeypatch):
    """The upload after the first step fails, and all from the epoch's end on."""
    DirFileSystem = pytest.importorskip("fsspec.implementations.dirfs").DirFileSystem
    connected, cuts = DirFileSystem.put_file, []

    def put_file(self, local, name):
        if cuts and cuts.pop():
            raise ConnectionError("cut")
        connected(self, local, name)

    monkeypatch.setattr(DirFileSystem, "put_file", put_file)
    cut = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: batch == 0 and cuts.append(True),
        on_epoch_end=lambda epoch, logs: cuts.extend([True] * 99),
    )
    with pytest.raises(places.LostDirectoryError) as lost:
        towers.train(config(run_dir=MEMORY, epochs=1, checkpoint_every=1), [cut])
    assert "checkpoints/epoch-0-step-1/manifest.json" in contents(memory)
    assert "final.keras" not in contents(memory)
    (copy,) = tmp_path.glob("towers-*/run")
    assert "; training continues." in (copy / "log.txt").read_text()
    assert str(lost.value) == (
        f"{MEMORY} cannot be written: cut. All that it lacks is in {copy}: continue with "
        f"resume={copy}."
    )
    assert command_line.exit_code(lambda: (_ for _ in ()).throw(lost.value)) == 5
    again = towers.TrainConfig(resume=str(copy), trust_run_dir=True, epochs=2)
    assert towers.train(again) == whole[1]


def test_only_the_process_that_began_last_writes(memory, tmp_path):
    def steal(epoch):
        memory.pipe("/run/checkpoints/lock", b"process 7 on another, 1")

    with pytest.raises(places.LostDirectoryError, match=f"another process trains in {MEMORY} now"):
        towers.train(config(run_dir=MEMORY), [at_epoch_end(steal)])
    assert not any("epoch-1" in name or "epoch-2" in name for name in contents(memory))
    (copy,) = tmp_path.glob("towers-*/run")
    assert (copy / "checkpoints/epoch-1-step-4").is_dir()


def test_a_fit_resumes_from_memory(memory, tmp_path):
    parallel, data = loaders.classifier(), rows(20)
    first = parallel.get_weights()

    def fit(callbacks=(), directory=MEMORY):
        keras.utils.set_random_seed(0)
        parallel.set_weights(first)
        resume = towers.Resume(directory, every=2)
        parallel.fit(*data, batch_size=5, epochs=2, verbose=0, callbacks=[resume, *callbacks])
        return [bits(weight) for weight in parallel.weights]

    def fail(epoch):
        raise OSError("failed")

    with pytest.raises(OSError, match="failed"):
        fit([at_epoch_end(fail)])
    assert "checkpoints/epoch-0-step-4/manifest.json" in contents(memory)
    assert fit() == fit(directory="whole") and copies(tmp_path) == []
