"""Processes of tests: with TensorFlow imported, workers of a run, and what others have started.

TensorFlow's import takes most of a short process's time. They are forked from a server that has
imported it, in another environment, and done nothing else.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAMESPACE = ("unshare", "--map-root-user", "--mount", "sh", "-euc")
READ_ONLY = 'mount --bind . . && mount -o remount,bind,ro . && cd "$PWD" && exec "$@"'
SMALL_DISK = """
    mkdir disk && mount -t tmpfs -o size=1M tmpfs disk && cd disk
    "$@" || code=$?
    rm filler && cp -R run .. && exit ${code:-0}
"""
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


def run(*arguments, cwd=ROOT, environment=None, timeout=300):
    """What `subprocess.run` returns of python ARGUMENTS, its output captured as text.

    environment: all its variables; None: those of this process. It is killed after the timeout.
    """
    process = Forked(arguments, cwd, dict(os.environ) if environment is None else environment)
    ((code, said, errors),) = finish([process], timeout)
    return subprocess.CompletedProcess(arguments, code, said, errors)


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


# Workers of a run, on this machine.


def addresses(count):
    """Addresses whose ports are free now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]


def tf_config(hosts, index):
    """A worker's TF_CONFIG; {} for one that is alone."""
    if len(hosts) == 1:
        return "{}"
    return json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})


def start(hosts, index, *arguments, cwd=ROOT, **environment):
    """One worker: python ARGUMENTS, which finds the project's modules."""
    return Forked(
        arguments,
        cwd,
        {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONUNBUFFERED": "1",
            "TF_CONFIG": tf_config(hosts, index),
            **environment,
        },
    )


def start_all(count, *arguments, **environment):
    """All workers of a run."""
    hosts = addresses(count)
    return [start(hosts, index, *arguments, **environment) for index in range(count)]


def finish(processes, timeout=300):
    """(exit code, stdout, stderr) of each."""
    try:
        ended = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *texts) for process, texts in zip(processes, ended, strict=True)]


def run_all(count, *arguments, timeout=300, **environment):
    """Starts all workers, and waits for them."""
    return finish(start_all(count, *arguments, **environment), timeout)


# Processes that are no children of this one, and disks that some see alone.


def children(pid):
    """The processes that another's main thread has started, in order, and not yet waited for."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def has_ended(pid, seconds=10.0):
    """Whether a process, no child of this one, ends in this time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # nobody has asked for its exit code yet
            return True
        time.sleep(0.02)
    return False


def wait_for(*paths, seconds=30.0):
    """Waits until these files hold whole lines; returns their texts."""
    until = time.monotonic() + seconds
    while not all(path.exists() and path.read_text().endswith("\n") for path in paths):
        assert time.monotonic() < until, f"{paths} do not come"
        time.sleep(0.02)
    return [path.read_text() for path in paths]


def skip_where_nothing_can_be_mounted(cwd):
    """As in many containers."""
    import pytest  # not in the processes that begin here

    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) here")
    for script in (READ_ONLY, 'mount -t tmpfs -o size=1M tmpfs . && "$@"'):
        done = subprocess.run([*NAMESPACE, script, "sh", "true"], cwd=cwd, capture_output=True)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.decode().strip()}")


@contextlib.contextmanager
def soon():
    """A call that blocks fails: the alarm ends it."""

    def fail(number, frame):
        raise AssertionError("it blocks")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(10)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
