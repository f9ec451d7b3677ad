"""python -m towers.launch as a user calls it."""

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.app.launch.players import ROOT, launch, start_command
from tests.machine import fake_nvml


def command(tmp_path, *arguments, **options):
    """(exit code, stdout, stderr)."""
    process = start_command(tmp_path, *arguments, **options)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


@pytest.mark.parametrize("arguments, message", [
    (["--workers=2"], "there is nothing to run: give the command behind --, as in python -m"),
    (["--workers=2", "--"], "there is nothing to run"),
    (["--workers=2", "fit.py", "--x=3"], "put -- in front of 'fit.py', as in python -m towers"),
    (["--workers=2", "x"], "'x' is not a flag."),
    (["--", "fit.py"], "--workers is missing: say how many, such as --workers=2."),
    (["--workers=0", "--", "fit.py"], "--workers (0) must be at least 1."),
    (["--workers=two", "--", "fit.py"], "flag --workers=two: invalid literal for int()"),
    (["--workers=2", "--gpus_per_worker=0", "--", "fit.py"], "--gpus_per_worker (0) must be at"),
    (["--workers=2", "--max_restarts=-1", "--", "fit.py"], "--max_restarts (-1) must be at least"),
    (["--worker=2", "--", "fit.py"], "Unknown command line flag 'worker'. Did you mean: workers"),
    (["--workers=2", "--", "fti.py"], "'fti.py' is no file in "),
    (["--workers=2", "--", "python", "fit.py"], "'python' comes by itself"),
    (["--workers=2", "--hosts=a:1,b:1", "--", "fit.py"], "--hosts is for --print_tf_config"),
    (["--print_tf_config"], "--hosts is empty; name each machine and a port"),
    (["--print_tf_config", "--hosts=a"], "--hosts: 'a' is not host:port"),
])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, tmp_path):
    (tmp_path / "fit.py").write_text("1 / 0")
    code, stdout, stderr = command(tmp_path, *arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert message in stderr


def test_help_lists_the_flags(tmp_path):
    code, stdout, stderr = command(tmp_path, "--help")
    assert (code, stderr) == (0, "")
    assert "--workers: Processes that train together" in stdout and "--hosts:" in stdout


def test_the_scripts_flags_are_not_the_launchers(tmp_path):
    (tmp_path / "fit.py").write_text("import sys; print(sys.argv)")
    assert command(tmp_path, "--workers=1", "--", "fit.py", "--workers=9", "--help", "--") == (
        0, "['fit.py', '--workers=9', '--help', '--']\n", ""
    )


def test_a_module_can_be_run(tmp_path):
    (tmp_path / "fit.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert command(tmp_path, "--workers=1", "--", "-m", "fit", "--x") == (
        0, "__main__ ['--x']\n", ""
    )


def test_it_starts_fast_and_without_tensorflow(tmp_path):
    """In seconds of the processor, of which the launcher and its worker alone take some."""
    (tmp_path / "fit.py").touch()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert command(tmp_path, "--workers=1", "--", "fit.py") == (0, "", "")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    program = "import sys, towers.app.launch.__main__\n" \
        "print([n for n in ('tensorflow', 'keras', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("words", [[], ["--", "train.py", "--model=my model"]])
def test_for_several_machines_it_prints_what_to_type_on_each(words, tmp_path):
    hosts = ["10.0.0.1:2222", "10.0.0.2:2223"]
    code, stdout, stderr = command(
        tmp_path, "--print_tf_config", f"--hosts={','.join(hosts)}", *words
    )
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    where = [line.rpartition("  # ")[2] for line in lines]
    assert where == ["on 10.0.0.1, the chief", "on 10.0.0.2"]
    for index, line in enumerate(lines):
        typed = shlex.split(line, comments=True)
        assert typed[1 if not words else 0].startswith("TF_CONFIG=")
        text = typed[1 if not words else 0].removeprefix("TF_CONFIG=")
        assert json.loads(text) == {
            "cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}
        }
        if words:
            assert typed[1:] == ["python", "train.py", "--model=my model"]
        else:
            assert typed[0] == "export"


def test_what_it_prints_is_understood_by_a_shell(tmp_path):
    _, stdout, _ = command(tmp_path, "--print_tf_config", "--hosts=a:1")
    done = subprocess.run(["sh", "-c", f"{stdout}\nprintenv TF_CONFIG"], text=True,
                          stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["cluster"] == {"worker": ["a:1"]}


def test_each_worker_sees_its_own_gpus_of_those_there_are(tmp_path):
    text = "print(os.environ.get('CUDA_VISIBLE_DEVICES'))"
    fake_nvml.build(tmp_path, *[("GPU", f"GPU-{i}", 80000, 80000) for i in range(2)])
    path = {"LD_LIBRARY_PATH": str(tmp_path)}
    flags = ("--workers=2", "--gpus_per_worker=1")
    code, lines, _ = launch(tmp_path, text, *flags, environment=path)
    assert (code, sorted(lines)) == (0, ["0", "[worker 1] 1"])
    hidden = {**path, "CUDA_VISIBLE_DEVICES": "7,3,5"}
    assert sorted(launch(tmp_path, text, *flags, environment=hidden)[1]) == ["7", "[worker 1] 3"]
    assert sorted(launch(tmp_path, text, "--workers=2", environment=hidden)[1]) == [
        "7,3,5", "[worker 1] 7,3,5"
    ]
    code, _, stderr = launch(tmp_path, text, "--workers=3", *flags[1:], environment=path)
    assert code == 2 and "this machine has 2. Use --workers=2." in stderr


@pytest.mark.parametrize("flags, visible, warned", [
    (["--workers=2"], None, True), (["--workers=2"], "0,1", True),
    (["--workers=2"], "", False), (["--workers=2"], "-1", False), (["--workers=1"], None, False),
    (["--workers=2", "--gpus_per_worker=1"], "0,1", False),
])
def test_workers_that_share_gpus_are_warned_of(flags, visible, warned, tmp_path):
    driver = ["from towers.machine import nvidia", "nvidia.driver_version = lambda: '550.1'"]
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    code, lines, stderr = launch(
        tmp_path, "pass", *flags, inside=driver, environment=environment
    )
    assert (code, stderr) == (0, "")
    assert lines == (["Warning   all 2 workers see the same GPUs, and TensorFlow takes all of "
                      "their memory. --gpus_per_worker gives each worker its own."] * warned)


def test_lines_come_when_they_are_printed(tmp_path):
    (tmp_path / "fit.py").write_text("import time\nprint('now')\ntime.sleep(60)")
    begun = time.monotonic()
    process = start_command(tmp_path, "--workers=1", "--", "fit.py")
    assert process.stdout.readline() == "now\n" and time.monotonic() - begun < 30
    process.terminate()
    assert process.communicate() == ("", "stopped by SIGTERM\n")


@pytest.mark.parametrize("redirection", ["| head -1", ">&-", ">&- 2>&-", "> /dev/full"])
def test_nobody_who_has_stopped_reading_ends_the_run(redirection, tmp_path):
    (tmp_path / "fit.py").write_text(
        "import time\nfrom pathlib import Path\nfor i in range(5):\n    print(i)\n"
        "    time.sleep(0.1)\nPath('done').touch()"
    )
    typed = f"{sys.executable} -m towers.launch --workers=1 -- fit.py {redirection}; " \
        "echo ${PIPESTATUS[0]} > code"
    subprocess.run(["bash", "-c", typed], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert Path(tmp_path, "done").exists()
    assert Path(tmp_path, "code").read_text() == "0\n"


@pytest.mark.matrix
def test_a_user_error_in_train_py_is_its_own_line_and_code(tmp_path):
    code, stdout, stderr = command(
        tmp_path, "--workers=2", "--", str(ROOT / "train.py"), "--batch_size=0"
    )
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: --batch_size (0)") and stderr.count("\n") == 1
