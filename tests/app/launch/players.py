"""Small scripts that play workers, and the launcher that starts them, without TensorFlow."""

import os
import subprocess
import sys

# What every script may use: which worker it is, of how many, and a way to tell the test something.
BEGINNING = """
import json, os, signal, sys, time
from pathlib import Path

config = json.loads(os.environ["TF_CONFIG"])
index, count = config["task"]["index"], len(config["cluster"]["worker"])


def note(name, text=""):
    Path(f"{name}-{index}").write_text(f"{text}\\n")


def wait_for(*names):
    while not all(Path(name).exists() for name in names):
        time.sleep(0.01)


def kill_self(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
"""


def start(tmp_path, text, *flags, words=(), environment=()):
    """The launcher's process, which runs script.py as workers: BEGINNING and the text.

    `flags` are the launcher's, `words` the script's; a first word that ends in .py is its name.
    """
    name = "script.py"
    if words and words[0].endswith(".py"):
        name, *words = words
    (tmp_path / name).write_text(BEGINNING + text)
    return start_command(tmp_path, *flags, "--", name, *words, environment=environment)


def start_command(tmp_path, *arguments, environment=()):
    """The launcher's process with these arguments; see `start`."""
    hidden = ("TF_CONFIG", "CUDA_VISIBLE_DEVICES", "TF_CPP_MIN_LOG_LEVEL", "KERAS_BACKEND")
    kept = {k: v for k, v in os.environ.items() if k not in hidden}
    return subprocess.Popen(
        [sys.executable, "-m", "towers.launch", *arguments],
        cwd=tmp_path,
        text=True,
        env={**kept, **dict(environment)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def launch(tmp_path, text, *flags, **options):
    """(exit code, stdout's lines, stderr) of a launcher that has ended; see `start`."""
    process = start(tmp_path, text, *flags, **options)
    stdout, stderr = process.communicate(timeout=60)
    return process.returncode, stdout.splitlines(), stderr
