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
from typing import Any

import keras
import tensorflow as tf

from towers.machine.gpus import as_integer
from towers.machine.keras_internals import Call, calls_in_order, calls_wrapped
from towers.machine.tensorflow_internals import custom_gradients_in_scope
from towers.machine.user_lines import warn_user

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
        begins = _found(begun_at, names) if begun_at else balanced(_sizes(calls), num_stages)
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
        for i, call in enumerate(calls):
            stage = bisect.bisect(begins, i) - 1
            self._of_calls.setdefault(id(call.operation), []).append(stage)
            for variable in getattr(call.operation, "variables", ()):
                self._of_variables.setdefault(id(variable), stage)

    def of(self, variables: Iterable[Any]) -> list[int]:
        """Returns each variable's stage: the first that uses it, or the last if no layer does."""
        return [self._of_variables.get(id(v), self.num_stages - 1) for v in variables]

    @contextmanager
    def scopes(self) -> Iterator[None]:
        """Puts each layer's operations and gradients into the name scope of its stage."""

        def scope(operation: Any, index: int) -> AbstractContextManager:
            stages = self._of_calls[id(operation)]
            return tf.name_scope(f"{STAGE_SCOPE}{stages[index % len(stages)]}")

        with calls_wrapped(self._operations, scope), custom_gradients_in_scope():
            yield


def make_stages(
    model: keras.Model,
    devices: Sequence[str],
    gpus_per_tower: int,
    stages: Sequence[str] | None,
    **others: Any,
) -> Stages | None:
    """Returns a step's stages, or None for one; takes `check_stages`' and `Stages`' arguments."""
    check_stages(gpus_per_tower, stages, **others)
    check_groups(len(devices), gpus_per_tower)
    return None if gpus_per_tower == 1 else Stages(model, devices, gpus_per_tower, stages)


def check_compiled(stages: Stages | None, uses_xla: bool | str) -> bool | str:
    """Returns whether XLA compiles the towers of a step, as `uses_xla`; not if there are stages.

    Warns if it compiles the towers only without stages.
    """
    if stages is not None and uses_xla:
        warn_user(
            "gpus_per_tower: XLA compiles this model only without stages, which changes the "
            "bits. If they must be equal, use jit_compile=False for both.",
        )
        return False
    return uses_xla


def check_groups(num_devices: int, gpus_per_tower: int) -> None:
    """Raises ValueError if `gpus_per_tower` does not divide the number of a worker's devices."""
    if rest := num_devices % gpus_per_tower:
        raise ValueError(
            f"gpus_per_tower ({gpus_per_tower}) must divide the number of devices, which is "
            f"{num_devices}: use {num_devices - rest or gpus_per_tower} devices."
        )


def check_stages(gpus_per_tower: int, stages: Sequence[str] | None, **others: Any) -> None:
    """Raises ValueError for arguments of `TowerStep` that no model and no devices allow."""
    if (as_integer(gpus_per_tower) or 0) < 1:
        raise ValueError(f"gpus_per_tower ({gpus_per_tower!r}) must be an integer of at least 1.")
    if isinstance(stages, str) or not all(isinstance(name, str) for name in stages or ()):
        raise ValueError(f"stages ({stages!r}) must be a list of layers' names.")
    if stages is not None and len(stages) != gpus_per_tower - 1:
        raise ValueError(
            f"stages ({', '.join(stages)}) must name {gpus_per_tower - 1} layers, which begin the "
            f"second and later stages. Give other names, or gpus_per_tower={len(stages) + 1}."
        )
    for name, value in others.items():
        if gpus_per_tower > 1 and (name, value) in _REFUSED:
            raise ValueError(
                f"gpus_per_tower ({gpus_per_tower}) does not go with {name}={value}: "
                f"{_REFUSED[name, value]}"
            )


_COPIES = "a device of a stage needs that stage's parameters alone. Use strategy=parameter_server."
_REFUSED: dict[tuple[str, Any], str] = {
    ("strategy", "mirrored"): _COPIES,
    ("strategy", "sharded"): _COPIES,
    ("jit_compile", True): "XLA would compile each stage separately, which changes the bits. Use "
    "jit_compile=False.",
}


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
        found, total = [0], 0
        for i, size in enumerate(sizes):
            is_last_chance = len(sizes) - i == num_parts - len(found)
            if i > found[-1] and (total + size > limit or is_last_chance):
                found.append(i)
                total = 0
            total += size
        return found

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
    while any(queues.values()):
        for device, queue in queues.items():
            while queue and waiting[queue[0][0]][0] == queue[0][1]:
                t, level = queue.pop(0)
                waiting[t].pop(0)
                order.append((t, level, device))
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
