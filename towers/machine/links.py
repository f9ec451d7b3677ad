"""Tries the links between a machine's memories before the first step: some change bits or hang.

/cpu:0   --->  /gpu:1  --->  /cpu:0                  each device
/cpu:0   --->  /gpu:0  --->  /gpu:1  --->  /cpu:0    each pair, in both directions
"""

import functools
import queue
import threading
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import tensorflow as tf

from towers.machine.devices import HOST

SECONDS = 60.0  # a link that needs longer hangs; a busy machine takes milliseconds
_SIZES = (1, 4_099, 2**19)  # of 8 bytes; drivers move small, odd and large values in other ways


@functools.cache
def try_links(devices: tuple[str, ...], between: bool) -> None:
    """Sends known bits over each link, once in a process.

    between: whether steps also send from device to device, and not only from and to the CPU.

    Raises ValueError, which names the link, if bits change or nothing arrives in `SECONDS`.
    """
    routes: list[tuple[str, ...]] = [(device,) for device in devices]
    if between:  # last, so that these links are the only ones that are not known to be good
        routes += permutations(devices, 2)
    answers: queue.Queue[str | Exception] = queue.Queue()

    def send_all() -> None:
        # Each route gets other bits: memory that a lost copy never wrote may hold the last ones.
        bits = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, len(routes) + max(_SIZES))
        for i, route in enumerate(routes):
            try:
                answers.put(_fault([bits[i : i + size] for size in _SIZES], route))
            except Exception as error:
                answers.put(error)

    # Python waits for other threads when it exits, so this one, which may hang, is a daemon.
    threading.Thread(target=send_all, daemon=True, name="towers-links").start()
    for route in routes:
        try:
            fault = answers.get(timeout=SECONDS)
        except queue.Empty:
            fault = f"hangs: nothing arrived in {SECONDS:g} seconds"
        if isinstance(fault, Exception):
            raise ValueError(f"{_link(route)} fails: {fault}. {_fix(route)}") from fault
        if fault:
            raise ValueError(f"{_link(route)} {fault}. {_fix(route)}")


def copied(value: tf.Tensor, device: str) -> tf.Tensor:
    """Returns a tensor's copy on another device, sent as steps send values."""
    with tf.device(device):
        return tf.identity(value)


def _fault(patterns: Sequence[np.ndarray], route: Sequence[str]) -> str:
    """Returns what is wrong with values that went to each device of a route and back, or ""."""
    for sent in patterns:
        with tf.device(HOST):
            value = tf.constant(sent)
        for device in (*route, HOST):
            value = copied(value, device)
        if wrong := np.count_nonzero(value.numpy() != sent):
            return f"changes bits: {wrong:,} of {len(sent):,} numbers arrived changed"
    return ""


def _link(route: Sequence[str]) -> str:
    if len(route) == 1:
        return f"the link between {HOST} and {route[0]}"
    return f"the link from {route[0]} to {route[1]}"


def _fix(route: Sequence[str]) -> str:
    if len(route) == 1:
        return f"Leave {route[0]} out, such as with CUDA_VISIBLE_DEVICES, and have it checked."
    return "Use add_on=cpu: all additions run on the CPU, and devices send nothing to each other."
