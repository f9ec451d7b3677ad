"""Orders the work of a device group's towers in the stages of their layers, as a pipeline.

    gpus_per_tower=3. F: a tower's forward pass. B: its backward pass. The last stage joins both.

    stage 0   F0  F1  F2           B0  F3  B1      B2      B3
    stage 1       F0  F1      B0  F2  B1  F3  B2      B3
    stage 2           F0B0    F1B1    F2B2    F3B3

Stage s begins with S - s - 1 forward passes. Then forward and backward passes take turns (1F1B of
PipeDream, Narayanan et al. 2019). It keeps the activations of at most S - s towers.
"""

import itertools
from collections.abc import Mapping, Sequence


def in_order(
    groups: Mapping[str, Sequence[str]], devices: Sequence[str], levels: Sequence[int]
) -> list[tuple[int, int, str]]:
    """Returns all (tower, level, device) calls; a call follows the calls that it waits for.

    Args:
        groups: the S devices of each device group, by the group's first device.
        devices: the first device of each tower's group.
        levels: the levels that have operations, ascending.
    """
    queues: dict[str, list[tuple[int, int]]] = {}
    for leader, group in groups.items():
        own = [t for t, device in enumerate(devices) if device == leader]
        for stage, device in enumerate(group):
            pieces = one_forward_one_backward(stage, len(group), len(own))
            queues[device] = [(own[t], level) for t, level in pieces if level in levels]
    waiting = {t: list(levels) for t in range(len(devices))}
    order: list[tuple[int, int, str]] = []
    while any(queues.values()):
        for device, queue in queues.items():
            while queue and waiting[queue[0][0]][0] == queue[0][1]:
                t, level = queue.pop(0)
                waiting[t].pop(0)
                order.append((t, level, device))
    return order


def one_forward_one_backward(
    stage: int, num_stages: int, num_towers: int
) -> list[tuple[int, int]]:
    """Returns a stage's (tower, level) calls, in order; the last stage has one level."""
    last = 2 * (num_stages - 1)
    ahead = num_stages - 1 - stage
    forward = [(t, stage) for t in range(num_towers)]
    if not ahead:
        return forward
    backward = [(t, last - stage) for t in range(num_towers)]
    pairs = itertools.zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [each for pair in pairs for each in pair if each is not None]
