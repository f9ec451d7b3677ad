"""Each worker's environment: TF_CONFIG and CUDA_VISIBLE_DEVICES."""

import json
import random
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice, takewhile

from towers.workers.cluster import LARGEST_PORT, is_address

INSTALLED = "towers-train"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
_HOST = "127.0.0.1"  # TensorFlow's gRPC connections are neither authenticated nor encrypted
# Linux gives the ports above to whoever connects, the workers themselves among them.
_PORTS = range(10_000, 32_768)


def gpu_shares(
    num_workers: int, gpus_per_worker: int, visible: str | None, num_gpus: int | None
) -> list[str]:
    """Each worker's CUDA_VISIBLE_DEVICES, such as ["0,1", "2,3"].

    Args:
        num_workers: how many workers.
        gpus_per_worker: GPUs of each worker.
        visible: CUDA_VISIBLE_DEVICES as it is now, numbers or UUIDs; None if it is not set.
        num_gpus: how many GPUs the machine has, used if `visible` is None; None if unknown.

    Raises:
        ValueError: there are too few GPUs.
    """
    needed = num_workers * gpus_per_worker
    if visible is None:
        names = list(map(str, range(needed if num_gpus is None else num_gpus)))
        where = "this machine has"
    else:  # as for CUDA, the list ends before the first entry that names no GPU
        entries = map(str.strip, visible.split(","))
        names = list(takewhile(lambda name: name not in ("", "-1"), entries))
        where = f"{VISIBLE_GPUS}={visible!r} names"
    if len(names) < needed:
        raise ValueError(
            f"--workers ({num_workers}) with --gpus_per_worker ({gpus_per_worker}) need {needed} "
            f"GPUs; {where} {len(names)}. Use less of either, or leave --gpus_per_worker out."
        )
    return [",".join(names[i:i + gpus_per_worker]) for i in range(0, needed, gpus_per_worker)]


def tf_config(addresses: Sequence[str], index: int) -> str:
    """TF_CONFIG's text for one worker.

    Args:
        addresses: of all workers, "host:port", the chief's first.
        index: of this worker.
    """
    cluster = {"worker": list(addresses)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def worker_environments(shares: Sequence[str | None]) -> list[dict[str, str]]:
    """The variables of each worker; `shares` holds their GPUs, or None for all."""
    addresses, found = free_addresses(len(shares)), []
    for index, share in enumerate(shares):
        gpus = {} if share is None else {VISIBLE_GPUS: share}
        config = tf_config(addresses, index)
        # Unbuffered: each line comes when it is written.
        found.append({"TF_CONFIG": config, "PYTHONUNBUFFERED": "1", **gpus})
    return found


def free_addresses(count: int) -> list[str]:
    """So many different addresses of this machine, "127.0.0.1:port", at which nobody listens."""
    ports = random.sample(_PORTS, len(_PORTS))  # another launcher, at the same time, finds others
    return [f"{_HOST}:{port}" for port in islice(filter(_is_free, ports), count)]


def _is_free(port: int) -> bool:
    with socket.socket() as trial, suppress(OSError):
        trial.bind((_HOST, port))
        return True
    return False


def lines_to_type(hosts: Sequence[str], words: Sequence[str]) -> Iterator[str]:
    """A line for each machine: its TF_CONFIG, and the command if there is one.

    Raises:
        ValueError: there is no host, one is no address, or two are the same.
    """
    addresses = [host.strip() for host in hosts]
    if not addresses or not all(map(is_address, addresses)) or len({*addresses}) < len(addresses):
        raise ValueError(
            f"--hosts ({','.join(hosts)}) must be different addresses, host:port, with ports from "
            f"1 to {LARGEST_PORT:,}, such as --hosts=10.0.0.1:2222,10.0.0.2:2222 or [fe80::1]:2222."
        )
    typed = shlex.join(words if words[:1] == [INSTALLED] else ["python", *words])
    for index, address in enumerate(addresses):
        assigned = f"TF_CONFIG='{tf_config(addresses, index)}'"
        start = f"{assigned} {typed}" if words else f"export {assigned}"
        yield f"{start}  # on {address.rpartition(':')[0]}{', the chief' if not index else ''}"
