"""Real worker processes for tests: on this machine, as many as asked for."""

import json
import os
import socket
from pathlib import Path

from tests.forked import Forked

ROOT = Path(__file__).parents[1]


def addresses(count):
    """Addresses whose ports are free now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    found = [f"127.0.0.1:{probe.getsockname()[1]}" for probe in probes]
    for probe in probes:
        probe.close()
    return found


def tf_config(hosts, index):
    """A worker's TF_CONFIG; {} for one that is alone."""
    if len(hosts) == 1:
        return "{}"
    return json.dumps({"cluster": {"worker": hosts}, "task": {"type": "worker", "index": index}})


def start(hosts, index, *arguments, cwd=ROOT, **environment):
    """One worker: python ARGUMENTS, which finds the project's modules."""
    return Forked(arguments, cwd, {
        **os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1",
        "TF_CONFIG": tf_config(hosts, index), "PYTHONPATH": str(ROOT), **environment,
    })


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
