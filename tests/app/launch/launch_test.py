"""python -m towers.launch as a user calls it."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from tests.app.launch.players import ROOT, start_command


def command(tmp_path, *arguments):
    """(exit code, stdout, stderr)."""
    process = start_command(tmp_path, *arguments)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout, stderr


@pytest.mark.parametrize("arguments, named", [
    (["--workers=2"], ["there is nothing to run", "-- train.py"]),
    (["--workers=2", "fit.py", "--x=3"], ["'x'"]),
    (["--", "fit.py"], ["--workers is missing", "--workers=2"]),
    (["--workers=0", "--", "fit.py"], ["--workers=0", "positive"]),
    (["--workers=two", "--", "fit.py"], ["--workers=two"]),
    (["--workers=2", "--gpus_per_worker=0", "--", "fit.py"], ["--gpus_per_worker=0"]),
    (["--workers=2", "--max_restarts=-1", "--", "fit.py"], ["--max_restarts=-1"]),
    (["--worker=2", "--", "fit.py"], ["'worker'", "workers"]),
    (["--workers=2", "--", "fti.py"], ["'fti.py' is no file in ", "-- train.py"]),
    (["--workers=2", "--", "python", "fit.py"], ["'python' is no file in "]),
    (["--print_tf_config"], ["--hosts ()", "--hosts=10.0.0.1:2222"]),
    (["--print_tf_config", "--hosts=a"], ["--hosts (a)", "--hosts=10.0.0.1:2222"]),
])
def test_a_mistake_is_one_line_and_exit_code_2(arguments, named, tmp_path):
    (tmp_path / "fit.py").write_text("1 / 0")
    code, stdout, stderr = command(tmp_path, *arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and stderr.count("\n") == 1
    assert all(name in stderr for name in named), stderr


def test_help_lists_the_flags(tmp_path):
    code, stdout, stderr = command(tmp_path, "--help")
    assert (code, stderr) == (0, "")
    assert "--workers: Processes that train together" in stdout and "--hosts:" in stdout


@pytest.mark.parametrize("start", [["fit.py"], ["-m", "fit"]])
def test_the_scripts_flags_are_not_the_launchers(start, tmp_path):
    (tmp_path / "fit.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert command(tmp_path, "--workers=1", "--", *start, "--workers=9", "--help", "--") == (
        0, "__main__ ['--workers=9', '--help', '--']\n", ""
    )


def test_it_starts_without_tensorflow():
    program = "import sys, towers.app.launch.__main__\n" \
        "print([n for n in ('tensorflow', 'keras', 'numpy') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], text=True, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("words", [[], ["--", "train.py", "--model=my model"]])
def test_for_several_machines_it_prints_what_a_shell_understands(words, tmp_path):
    hosts = ["10.0.0.1:2222", "[fe80::1]:2223"]
    code, stdout, stderr = command(
        tmp_path, "--print_tf_config", f"--hosts={','.join(hosts)}", *words
    )
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    where = [line.rpartition("  # ")[2] for line in lines]
    assert where == ["on 10.0.0.1, the chief", "on [fe80::1]"]
    for index, line in enumerate(lines):
        assigned, *started = shlex.split(line.removeprefix("export "), comments=True)
        assert json.loads(assigned.removeprefix("TF_CONFIG=")) == {
            "cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}
        }
        assert started == (["python", "train.py", "--model=my model"] if words else [])


@pytest.mark.parametrize("redirection", ["| head -1", ">&- 2>&-", "> /dev/full"])
def test_nobody_who_has_stopped_reading_ends_the_run(redirection, tmp_path):
    (tmp_path / "fit.py").write_text(
        "import time\nfrom pathlib import Path\nfor i in range(5):\n    print(i)\n"
        "    time.sleep(0.1)\nPath('done').touch()"
    )
    typed = f"{sys.executable} -m towers.launch --workers=1 -- fit.py {redirection}; " \
        "echo ${PIPESTATUS[0]} > code"
    subprocess.run(["bash", "-c", typed], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60)
    assert (tmp_path / "done").exists()
    assert (tmp_path / "code").read_text() == "0\n"
