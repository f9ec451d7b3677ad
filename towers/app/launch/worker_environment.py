"""Makes each worker's environment: TF_CONFIG and CUDA_VISIBLE_DEVICES."""

import json
import os
import random
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile

from towers.app.command_line import show
from towers.machine import nvidia
from towers.workers.cluster import LARGEST_PORT, is_address

INSTALLED = "towers-train"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_HOST = "127.0.0.1"  # TensorFlow's gRPC connections are neither authenticated nor encrypted
# Linux uses higher ports for outgoing connections, including those between the workers.
_PORTS = range(10_000, 32_768)


def gpu_shares(num_workers: int, gpus_per_worker: int | None) -> list[str | None]:
    """Returns each worker's CUDA_VISIBLE_DEVICES, ["0,1", "2,3"]; None leaves it unchanged.

    Raises:
        ValueError: there are too few GPUs.
    """
    visible = os.environ.get(VISIBLE_GPUS)
    if gpus_per_worker is None:
        if num_workers > 1 and visible not in ("", "-1") and nvidia.driver_version():
            show(f"Warning   all {num_workers} workers see the same GPUs, and TensorFlow takes all "
                 "of their memory. --gpus_per_worker gives each worker its own.")
        return [None] * num_workers
    needed = num_workers * gpus_per_worker
    if visible is None:
        gpus, where = nvidia.driver_gpus(), "this machine has"
        names = [str(i) for i in range(needed if gpus is None else len(gpus))]
    else:  # as for CUDA, the list ends before the first entry that names no GPU
        entries, where = map(str.strip, visible.split(",")), f"{VISIBLE_GPUS}={visible!r} names"
        names = list(takewhile(lambda name: name not in ("", "-1"), entries))
    if len(names) < needed:
        raise ValueError(
            f"--workers ({num_workers}) with --gpus_per_worker ({gpus_per_worker}) need {needed} "
            f"GPUs; {where} {len(names)}. Use less of either, or leave --gpus_per_worker out."
        )
    return [",".join(names[i:i + gpus_per_worker]) for i in range(0, needed, gpus_per_worker)]


def worker_environments(shares: Sequence[str | None]) -> list[dict[str, str]]:
    """Returns each worker's environment variables; `shares` are its GPUs, from `gpu_shares`."""
    addresses, found = free_addresses(len(shares)), []
    for index, share in enumerate(shares):
        gpus = {} if share is None else {VISIBLE_GPUS: share}
        # Unbuffered, so that each line appears when it is written.
        found.append({"TF_CONFIG": _tf_config(addresses, index), "PYTHONUNBUFFERED": "1", **gpus})
    return found


def _tf_config(addresses: Sequence[str], index: int) -> str:
    """Returns the JSON text with a worker's index and all addresses, the chief's address first."""
    task = {"type": "worker", "index": index}
    return json.dumps({"cluster": {"worker": list(addresses)}, "task": task})


def free_addresses(count: int) -> list[str]:
    """Returns `count` different unused addresses of this machine, such as "127.0.0.1:12345"."""
    found: list[str] = []
    # In random order, so that two launchers at the same time find different ports.
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as trial, suppress(OSError):
            trial.bind((_HOST, port))
            found.append(f"{_HOST}:{port}")
        if len(found) == count:
            break
    return found


def lines_to_type(hosts: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """Yields a line for each machine: its TF_CONFIG, and the command if there is one.

    Raises:
        ValueError: there is no host, a host is not host:port, or two hosts are the same.
    """
    addresses = [host.strip() for host in hosts]
    if not addresses or not all(map(is_address, addresses)) or len({*addresses}) < len(addresses):
        raise ValueError(
            f"--hosts ({','.join(hosts)}) must be different addresses, host:port, with ports from "
            f"1 to {LARGEST_PORT:,}, such as --hosts=10.0.0.1:2222,10.0.0.2:2222 or [fe80::1]:2222."
        )
    typed = shlex.join(words if words[:1] == [INSTALLED] else ["python", *words])
    for index, address in enumerate(addresses):
        assigned = f"TF_CONFIG='{_tf_config(addresses, index)}'"
        start = f"{assigned} {typed}" if words else f"export {assigned}"
        yield f"{start}  # on {address.rpartition(':')[0]}{', the chief' if not index else ''}"
