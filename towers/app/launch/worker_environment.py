"""Each worker's environment: TF_CONFIG and CUDA_VISIBLE_DEVICES."""

import json
import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from towers.workers.cluster import LARGEST_PORT, is_address

VARIABLE = "CUDA_VISIBLE_DEVICES"
_HOST = "127.0.0.1"  # TensorFlow's gRPC asks nobody who he is
_LOWEST_PORT = 10_000
# From here on the system gives ports to whoever connects, the workers themselves among them.
CONNECTIONS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_CONNECTIONS = 32_768


def shares(
    num_workers: int, gpus_per_worker: int, visible: str | None, num_present: int | None
) -> list[str]:
    """Each worker's CUDA_VISIBLE_DEVICES, such as ["0,1", "2,3"].

    Args:
        num_workers: how many workers.
        gpus_per_worker: GPUs of each.
        visible: CUDA_VISIBLE_DEVICES as it is now: numbers or UUIDs; None where it is not set.
        num_present: how many GPUs the machine has; None where nobody knows. Not looked at where
            CUDA_VISIBLE_DEVICES is set.

    Raises:
        ValueError: there are not so many.
    """
    needed = num_workers * gpus_per_worker
    if visible is not None:
        names, whose = _named(visible), f"{VARIABLE}={visible!r} names"
    else:
        present = needed if num_present is None else num_present
        names, whose = list(map(str, range(present))), "this machine has"
    if len(names) < needed:
        raise ValueError(
            f"--workers ({num_workers}) with --gpus_per_worker ({gpus_per_worker}) need {needed} "
            f"GPUs; {whose} {len(names)}. {_way_out(num_workers, gpus_per_worker, len(names))}"
        )
    return [
        ",".join(names[first:first + gpus_per_worker])
        for first in range(0, needed, gpus_per_worker)
    ]


def _named(visible: str) -> list[str]:
    """The GPUs in the list; as for CUDA, it ends before the first entry that names none."""
    names = []
    for name in map(str.strip, visible.split(",")):
        if name in ("", "-1"):
            break
        names.append(name)
    return names


def _way_out(num_workers: int, gpus_per_worker: int, num_gpus: int) -> str:
    if num_gpus >= num_workers:
        return f"Use --gpus_per_worker={num_gpus // num_workers}."
    if num_gpus >= gpus_per_worker:
        return f"Use --workers={num_gpus // gpus_per_worker}."
    return "Leave --gpus_per_worker out to run on CPUs."


def tf_config(addresses: Sequence[str], index: int) -> str:
    """TF_CONFIG's text for one worker.

    Args:
        addresses: of all workers, "host:port", the chief's first.
        index: of this worker.
    """
    cluster = {"worker": list(addresses)}
    return json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})


def free_addresses(count: int) -> list[str]:
    """Addresses on this machine that nobody listens at, "127.0.0.1:port", all different.

    Raises:
        ValueError: there are not so many.
    """
    found: list[str] = []
    with ExitStack() as held:
        for port in candidate_ports():
            trial = held.enter_context(socket.socket())
            try:
                trial.bind((_HOST, port))
            except OSError:
                continue
            found.append(f"{_HOST}:{port}")
            if len(found) == count:
                return found
    raise ValueError(f"{count} workers need as many free ports on {_HOST}; there are fewer.")


def checked_hosts(hosts: Sequence[str]) -> list[str]:
    """The addresses in --hosts.

    Raises:
        ValueError: there is none, one has another form, or two are the same.
    """
    example = "--hosts=10.0.0.1:2222,10.0.0.2:2222"
    if not hosts:
        raise ValueError(f"--hosts is empty; name each machine and a port, such as {example}.")
    for text in hosts:
        if not is_address(text.strip()):
            raise ValueError(
                f"--hosts: {text!r} is not host:port with a port from 1 to {LARGEST_PORT:,}; "
                f"write it as in {example}, or --hosts=[fe80::1]:2222 for IPv6."
            )
    found = [text.strip() for text in hosts]
    twice = next((address for address in found if found.count(address) > 1), None)
    if twice is not None:
        raise ValueError(
            f"--hosts names {twice} twice; each worker needs an address of its own. Two on one "
            "machine take two ports."
        )
    return found


def candidate_ports() -> Iterator[int]:
    """Ports in random order: another launcher that looks at the same time finds others."""
    try:
        end = int(CONNECTIONS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        end = _USUAL_CONNECTIONS
    if end < 2 * _LOWEST_PORT:
        end = LARGEST_PORT + 1
    ports = range(_LOWEST_PORT, end)
    yield from random.sample(ports, len(ports))
