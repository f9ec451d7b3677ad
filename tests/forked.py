"""Processes that begin with TensorFlow imported, which takes most of a short process's time.

They are forked from a server that has imported it, in another environment, and done nothing else.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

_CONTEXT = multiprocessing.get_context("forkserver")


class _Server(forkserver.ForkServer):
    """multiprocessing's own, which the forks of its process use as well."""

    def __init__(self):
        super().__init__()
        self._process = None  # whose child it is
        self.set_forkserver_preload(["keras", "tensorflow"])

    def ensure_running(self):
        """multiprocessing asks for it before each new process."""
        if self._process in (None, os.getpid()):
            self._process = os.getpid()
            super().ensure_running()


_SERVER = _Server()
forkserver.connect_to_new_process = _SERVER.connect_to_new_process


def start_server():
    """Starts the server, for this process and those that it forks; else the first `Forked` does."""
    errors = os.dup(2)
    with open(os.devnull, "w") as nowhere:  # for what TensorFlow says as it is imported
        os.dup2(nowhere.fileno(), 2)
        _SERVER.ensure_running()
    os.dup2(errors, 2)
    os.close(errors)


class Forked:
    """python ARGUMENTS, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, arguments, cwd, environment):
        """
        Args:
            arguments: a script, -m and a module, or -c and a program; and its arguments.
            cwd: where it runs.
            environment: its variables, all of them.
        """
        self._said = tempfile.TemporaryDirectory()
        self._paths = [Path(self._said.name, name) for name in ("stdout", "stderr")]
        self._process = _CONTEXT.Process(
            target=_run, args=([*map(str, arguments)], str(cwd), environment, self._paths)
        )
        for path in self._paths:
            path.touch()
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        """None while it runs; negative for a signal."""
        return self._process.exitcode

    def communicate(self, timeout=None):
        """(stdout, stderr), once it has ended."""
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        self._process.join()
        return tuple(path.read_text() for path in self._paths)

    def first_line(self):
        """Of stdout, once it is there."""
        while "\n" not in self._paths[0].read_text():
            assert self._process.is_alive(), self._paths[1].read_text()
            time.sleep(0.01)
        return self._paths[0].read_text().splitlines()[0]

    def send_signal(self, number):
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self):
        self._process.kill()


def run(*arguments, cwd, environment=None, timeout=300):
    """What `subprocess.run` returns of python ARGUMENTS, its output captured as text.

    Args:
        arguments, cwd: see `Forked`.
        environment: all its variables; None: those of this process.
        timeout: seconds, after which it is killed.
    """
    process = Forked(arguments, cwd, dict(os.environ) if environment is None else environment)
    try:
        said, errors = process.communicate(timeout)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, said, errors)


def _run(arguments, cwd, environment, paths):
    """What `python ARGUMENTS` does."""
    for descriptor, path in enumerate([os.devnull, *paths]):
        mode = os.O_RDONLY if descriptor == 0 else os.O_WRONLY | os.O_CREAT
        opened = os.open(path, mode)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # that of the server's environment
    os.chdir(cwd)
    sys.stdin = open(os.devnull)
    sys.stdout, sys.stderr = open(1, "w", buffering=1), open(2, "w", buffering=1)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path.insert(0, cwd)
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        sys.path.insert(0, cwd)
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
        runpy.run_path(arguments[0], run_name="__main__")
