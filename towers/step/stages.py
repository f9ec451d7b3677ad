"""Splits the layers of a tower into stages; each GPU of a device group computes one stage.

    gpus_per_tower=2      /gpu:0             /gpu:1               /gpu:2             /gpu:3
                          [tower 0, 2: stage 0]-->[stage 1]       [tower 1, 3: stage 0]-->[stage 1]
                           conv ... pool      flatten ... loss     a second device group

The stages are contiguous in the order of the layers' calls. They change where an operation runs,
never its result. The towers of a device group run as a pipeline.

    gpus_per_tower=3. F: a tower's forward pass. B: its backward pass. The last stage joins both.

    stage 0   F0  F1  F2           B0  F3  B1      B2      B3
    stage 1       F0  F1      B0  F2  B1  F3  B2      B3
    stage 2           F0B0    F1B1    F2B2    F3B3

Stage s begins with S - s - 1 forward passes. Then forward and backward passes take turns (1F1B of
PipeDream, Narayanan et al. 2019). It keeps the activations of at most S - s towers.

If towers meet within a step, as for BatchNormalization, the parts between two meetings run in this
order, and the activations of all towers are kept.
"""

import bisect
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import keras
import tensorflow as tf

from towers.machine.keras_internals import Call, calls_in_order, calls_wrapped
from towers.machine.tensorflow_internals import custom_gradients_in_scope

STAGE_SCOPE = "stage_"  # begins the name scope in which a stage's layers are traced
_ROWS = 32  # the size that is assumed for an axis of unknown size


class Stages:
    """Knows the stage of each layer call, and of each variable, of a model.

    num_stages: S. names: for each stage, the names of the layers that it calls, in order.
    groups: the S devices of each device group, by the group's first device.
    """

    def __init__(
        self,
        model: keras.Model,
        devices: Sequence[str],
        num_stages: int,
        begun_at: Sequence[str] | None = None,
    ) -> None:
        """Args: devices: S of each group, group after group. begun_at: `stages` of `TowerStep`."""
        calls = calls_in_order(model)
        if calls is None:
            raise ValueError(
                f"gpus_per_tower ({num_stages}) needs a Sequential or functional model, but model "
                f"{model.name!r} has a custom `call`. Use gpus_per_tower=1."
            )
        if len(calls) < num_stages:
            raise ValueError(
                f"gpus_per_tower ({num_stages}) is more than the {len(calls)} layers of model "
                f"{model.name!r}: each stage needs one."
            )
        names = [call.operation.name for call in calls]
        if begun_at:
            begins = _found(begun_at, names)
        else:
            begins = balanced(_sizes(calls), num_stages)
        assert len(begins) == num_stages and begins[0] == 0, "each stage begins with a call"
        self.num_stages = num_stages
        self.groups = {
            devices[i]: list(devices[i : i + num_stages])
            for i in range(0, len(devices), num_stages)
        }
        ends = [*begins[1:], len(calls)]
        self.names = [list(dict.fromkeys(names[i:j])) for i, j in zip(begins, ends, strict=True)]
        self._operations = list({id(c.operation): c.operation for c in calls}.values())
        self._of_calls: dict[int, list[int]] = {}  # by operation, the stage of each of its calls
        self._of_variables: dict[int, int] = {}
        # A layer that is called twice may be in two stages. The first one owns its variables.
        for i, call in enumerate(calls):
            stage = bisect.bisect(begins, i) - 1
            self._of_calls.setdefault(id(call.operation), []).append(stage)
            for variable in getattr(call.operation, "variables", ()):
                self._of_variables.setdefault(id(variable), stage)

    def of(self, variables: Iterable[keras.Variable]) -> list[int]:
        """Returns each variable's stage: the first that uses it, or the last if no layer does."""
        return [self._of_variables.get(id(v), self.num_stages - 1) for v in variables]

    @contextmanager
    def scopes(self) -> Iterator[None]:
        """Puts each layer's operations and gradients into the name scope of its stage."""

        def scope(operation: keras.Operation, index: int) -> AbstractContextManager:
            stages = self._of_calls[id(operation)]
            return tf.name_scope(f"{STAGE_SCOPE}{stages[index % len(stages)]}")

        with calls_wrapped(self._operations, scope), custom_gradients_in_scope():
            yield


def _found(names: Sequence[str], of_calls: Sequence[str]) -> list[int]:
    """Returns the indices of the calls that begin stages, the first stage included."""
    begins = [0]
    for name in names:
        if name not in of_calls:
            near = difflib.get_close_matches(name, of_calls, n=3, cutoff=0)
            raise ValueError(
                f"stages ({name}): the model calls no such layer; nearest are {', '.join(near)}."
            )
        after = [i for i, other in enumerate(of_calls) if other == name and i > begins[-1]]
        if not after:
            raise ValueError(
                f"stages ({name}): it does not come after {of_calls[begins[-1]]!r}, which begins "
                "the stage before. Name the layers in their order, and not the first one."
            )
        begins.append(after[0])
    return begins


def balanced(sizes: Sequence[int], num_parts: int) -> list[int]:
    """Returns where nonempty contiguous parts begin, such that the largest sum is minimal."""

    def begins(limit: int) -> list[int]:
        starts, total = [0], 0
        for i, size in enumerate(sizes):
            is_last_chance = len(sizes) - i == num_parts - len(starts)
            if i > starts[-1] and (total + size > limit or is_last_chance):
                starts.append(i)
                total = 0
            total += size
        return starts

    limits = range(max(sizes), sum(sizes) + 1)
    smallest = bisect.bisect_left(limits, True, key=lambda n: len(begins(n)) <= num_parts)
    return begins(limits[smallest])


def _sizes(calls: Sequence[Call]) -> list[int]:
    """Returns the bytes of each call's outputs; a layer's first call counts its parameters, too."""
    known: set[int] = set()
    sizes = []
    for call in calls:
        variables = {id(v): v for v in getattr(call.operation, "variables", ())}
        new = [v for key, v in variables.items() if key not in known]
        known |= set(variables)
        sizes.append(
            sum(
                tf.as_dtype(v.dtype).size * math.prod(n or _ROWS for n in v.shape)
                for v in [*call.outputs, *new]
            )
        )
    return sizes


def in_order(
    groups: Mapping[str, Sequence[str]], devices: Sequence[str], levels: Sequence[int]
) -> list[tuple[int, int, str]]:
    """Returns all (tower, level, device) calls; a call follows the calls that it waits for.

    groups: as in `Stages`. devices: the first of each tower's group. levels: the ascending levels.
    """
    queues: dict[str, list[tuple[int, int]]] = {}
    for leader, group in groups.items():
        own = [t for t, device in enumerate(devices) if device == leader]
        for stage, device in enumerate(group):
            pieces = one_forward_one_backward(stage, len(group), len(own))
            queues[device] = [(own[t], level) for t, level in pieces if level in levels]
    waiting = {t: list(levels) for t in range(len(devices))}
    order: list[tuple[int, int, str]] = []
    # A call runs as soon as it is the first of its device and all before it in its tower ran.
    while any(queues.values()):
        for device, queue in queues.items():
            # More calls of one device follow each other until one has to wait for another device.
            while queue and waiting[queue[0][0]][0] == queue[0][1]:
                t, level = queue.pop(0)
                waiting[t].pop(0)
                order.append((t, level, device))
    assert len(order) == len(devices) * len(levels), "each tower has one call at each level"
    return order


def one_forward_one_backward(stage: int, num_stages: int, num_towers: int) -> list[tuple[int, int]]:
    """Returns a stage's (tower, level) calls, in order; the last stage has one level."""
    ahead = num_stages - 1 - stage
    forward = [(t, stage) for t in range(num_towers)]
    if not ahead:
        return forward
    backward = [(t, stage + 2 * ahead) for t in range(num_towers)]
    pairs = itertools.zip_longest(forward[ahead:], backward)
    return forward[:ahead] + [each for pair in pairs for each in pair if each is not None]
