"""Events of a trace -> the phases of each step: when they were under way, and what they cost.

    | input | parameters | towers ............... | sum | update |     host: whatever is left

An instant at which several phases are under way belongs to the first of them in `_PRIORITY`: what
runs beside the towers costs no time. So the phases of a step add up to the step.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from towers.app.diagnosis.recording import HOST, Event
from towers.machine.devices import is_gpu
from towers.machine.tensorflow_internals import copy_direction, stream_number
from towers.step import scopes

INPUT, PARAMETERS, TOWERS, SUM, UPDATE, HOST_OVERHEAD = PHASES = (
    "input", "parameters", "towers", "sum", "update", "host"
)
INPUT_MARK, STEP_MARK = "towers.input", "towers.step"  # the two parts of each step

_PRIORITY = (TOWERS, UPDATE, SUM, PARAMETERS, INPUT)
_OF_SCOPE = {
    scopes.SPLIT: PARAMETERS, scopes.PARAMETERS: PARAMETERS, scopes.WEIGHTS: PARAMETERS,
    scopes.SUM: SUM, scopes.UPDATE: UPDATE,
}

# Seconds that count as the cost of recording an event, at most. On a quiet machine 0.8 to 2.0
# microseconds were measured, for models with 10,000 events a step or more; with the lowest of them
# a short phase is not lost to what else disturbs a step.
RECORDING_SECONDS = 1e-6


class Interval(NamedTuple):
    """A span of time in seconds."""

    begin: float
    end: float


Streams: TypeAlias = "Mapping[tuple[str, str], Sequence[str]]"  # (plane, line) -> devices


class TowerSpan(NamedTuple):
    """When towers run, in seconds after the step's begin: means over steps.

    towers: the first and the last one: the same, but on a GPU. Its kernels carry no tower's name.
    """

    towers: tuple[int, int]
    device: str
    begin: float
    end: float


def steps(events: Iterable[Event]) -> list[Interval]:
    """Each step but the last, from its wait for input to the next one's.

    The last is not whole: what still runs as the profiler stops, it does not record.
    """
    begins = sorted(event.begin for event in events if event.name == INPUT_MARK)
    return [Interval(begin, end) for begin, end in zip(begins, begins[1:], strict=False)]


def phase_intervals(
    events: Iterable[Event], tower_devices: Sequence[str]
) -> dict[str, list[Interval]]:
    """When each phase but the last was under way; several may be at once.

    Args:
        events: as `trace.operations` gives them.
        tower_devices: the device of each tower.
    """
    result: dict[str, list[Interval]] = {phase: [] for phase in _PRIORITY}
    for event in events:
        phase = phase_of(event, tower_devices)
        if phase is not None:
            result[phase].append(Interval(event.begin, event.end))
    return result


def phase_of(event: Event, tower_devices: Sequence[str]) -> str | None:
    """The phase that an event is part of; None for the host's own, and for parts of operations.

    A host only sends work to a tower on a GPU: while the GPU then has nothing to do, that is the
    host's overhead.
    """
    if event.name == INPUT_MARK:
        return INPUT
    if event.plane != HOST:
        return _gpu_phase(event)
    tower = tower_of(event)
    if tower is not None and is_gpu(tower_devices[tower]):
        return None
    return _scope_phase(event.name)


def tower_of(event: Event) -> int | None:
    """The tower that an operation of the host computes."""
    if event.plane != HOST or _scope_phase(event.name) != TOWERS:
        return None
    return scopes.tower_index(event.name)


def phase_seconds(
    intervals: Mapping[str, Sequence[Interval]], step: Interval
) -> dict[str, float]:
    """The seconds of each phase of a step, in the order of PHASES; they add up to the step."""
    return _each_phase(length, intervals, step)


def phase_events(
    intervals: Mapping[str, Sequence[Interval]], step: Interval, begins: Sequence[float]
) -> dict[str, float]:
    """The number of events that begin in each phase of a step.

    Args:
        intervals: see `phase_intervals`.
        step: one of `steps`.
        begins: of all events, in order.
    """
    def count(instants: Iterable[Interval]) -> int:
        return sum(bisect_left(begins, end) - bisect_left(begins, begin) for begin, end in instants)

    return _each_phase(count, intervals, step)


def unrecorded(
    seconds: Mapping[str, float], events: Mapping[str, float], step_seconds: float
) -> dict[str, float]:
    """The phases of a step without the profiler, to which they add up.

    Recording costs time for each event, however long it lasts: a compiled update of 10 ms with 50
    events takes as long beside 25,000 other events as beside 1,000. So what a step is longer under
    the profiler is taken off the phases in proportion to their events, as far as a phase has it:
    `RECORDING_SECONDS` for each at most. The rest, of either sign, cannot be told from the
    machine's own unrest: it scales all phases alike.

    Args:
        seconds: of each phase under the profiler.
        events: that were recorded in each.
        step_seconds: of a step without the profiler.
    """
    result = dict(seconds)
    num_events = sum(events.values())
    excess = min(max(sum(seconds.values()) - step_seconds, 0.0), RECORDING_SECONDS * num_events)
    recorded = [phase for phase in seconds if events[phase]]
    # The phase with the least time an event first: what it has not got falls to those after it.
    for phase in sorted(recorded, key=lambda phase: seconds[phase] / events[phase]):
        cost = min(excess * events[phase] / num_events, seconds[phase])
        result[phase] -= cost
        excess -= cost
        num_events -= events[phase]
    scale = step_seconds / sum(result.values())
    return {phase: scale * value for phase, value in result.items()}


def split_update(seconds: Mapping[str, float], share: float) -> dict[str, float]:
    """Moves a share, at most all, of the update's time to the sum, for the additions in it."""
    moved = min(share, 1.0) * seconds[UPDATE]
    return {**seconds, SUM: seconds[SUM] + moved, UPDATE: seconds[UPDATE] - moved}


def computing_streams(
    events: Iterable[Event], tower_devices: Sequence[str], logical_gpus: Sequence[int]
) -> Streams:
    """The devices that each stream with kernels of towers computes for.

    The profiler knows GPUs, not the logical ones that they may be divided into. Each of these
    computes on a stream of its own, which TensorFlow numbers in their order. Where a GPU has
    another number of such streams, each of them counts for all its devices together.

    Args:
        events: as `trace.operations` gives them.
        tower_devices: the device of each tower.
        logical_gpus: how many logical GPUs each GPU is divided into.
    """
    of_plane: dict[str, dict[int, str]] = {}  # the stream's number -> its line
    for event in events:
        if event.plane != HOST and phase_of(event, tower_devices) == TOWERS:
            of_plane.setdefault(event.plane, {})[stream_number(event.line)] = event.line
    streams: dict[tuple[str, str], Sequence[str]] = {}
    for plane, lines in of_plane.items():
        devices = _devices_on(plane, tower_devices, logical_gpus)
        is_told = len(lines) == len(devices)
        for index, (_, line) in enumerate(sorted(lines.items())):
            streams[plane, line] = devices[index: index + 1] if is_told else devices
    return streams


def tower_intervals(
    events: Iterable[Event], tower_devices: Sequence[str], streams: Streams
) -> dict[tuple[int, int], list[Interval]]:
    """When each tower ran; on a GPU, when all of its towers did: see `TowerSpan`.

    Args:
        events: as `trace.operations` gives them.
        tower_devices: the device of each tower.
        streams: what `computing_streams` found in them.
    """
    result: dict[tuple[int, int], list[Interval]] = {}
    for event in events:
        if phase_of(event, tower_devices) == TOWERS:
            tower = tower_of(event)
            if tower is None:
                devices = streams[event.plane, event.line]
                on = [t for t, device in enumerate(tower_devices) if device in devices]
                towers = on[0], on[-1]
            else:
                towers = tower, tower
            result.setdefault(towers, []).append(Interval(event.begin, event.end))
    return result


def tower_spans(
    intervals: Mapping[tuple[int, int], Sequence[Interval]], step: Interval
) -> dict[tuple[int, int], Interval]:
    """From each tower's first operation's begin to its last one's end, after the step's begin."""
    spans = {}
    for towers, of_tower in intervals.items():
        clipped = clip(of_tower, step)
        if clipped:
            begin, end = min(i.begin for i in clipped), max(i.end for i in clipped)
            spans[towers] = Interval(begin - step.begin, end - step.begin)
    return spans


def mean_spans(
    steps: Sequence[Mapping[tuple[int, int], Interval]],
    tower_devices: Sequence[str],
    scale: float = 1.0,
) -> list[TowerSpan]:
    """The means over steps of what `tower_spans` gives for each, in the order of the towers.

    Args:
        steps: the spans of each step.
        tower_devices: the device of each tower.
        scale: what all times are multiplied by.
    """
    found: dict[tuple[int, int], list[Interval]] = {}
    for spans in steps:
        for towers, span in spans.items():
            found.setdefault(towers, []).append(span)
    return [
        TowerSpan(
            towers,
            tower_devices[towers[0]],
            scale * mean([span.begin for span in spans]),
            scale * mean([span.end for span in spans]),
        )
        for towers, spans in sorted(found.items())
    ]


def typical(values: Sequence[float]) -> list[int]:
    """The indices of the middle half of the values: without the few that something disturbed."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return order[len(values) // 4: len(values) - len(values) // 4]


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def clip(intervals: Iterable[Interval], within: Interval) -> list[Interval]:
    """The parts of the intervals that lie within another."""
    parts = (Interval(max(a, within.begin), min(b, within.end)) for a, b in intervals)
    return [part for part in parts if part.begin < part.end]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Joins intervals that overlap or touch, and puts them in order."""
    result: list[Interval] = []
    for interval in sorted(intervals):
        if result and interval.begin <= result[-1].end:
            result[-1] = Interval(result[-1].begin, max(interval.end, result[-1].end))
        else:
            result.append(interval)
    return result


def length(intervals: Iterable[Interval]) -> float:
    """The sum of the lengths."""
    return sum(end - begin for begin, end in intervals)


def _each_phase(
    size: Callable[[list[Interval]], float],
    intervals: Mapping[str, Sequence[Interval]],
    step: Interval,
) -> dict[str, float]:
    """The size of each phase's own part of a step; they add up to the step's."""
    sizes = {}
    covered: list[Interval] = []
    for phase in _PRIORITY:
        before = size(covered)
        covered = union([*covered, *clip(intervals[phase], step)])
        sizes[phase] = size(covered) - before
    sizes[HOST_OVERHEAD] = size([step]) - size(covered)
    return {phase: sizes[phase] for phase in PHASES}


def _scope_phase(name: str) -> str | None:
    """The phase of an operation "scope/.../node:type"."""
    scope = scopes.outermost(name)
    if scope is None:
        return None
    if scopes.tower_index(name) is not None:  # what a tower hands on is named after it
        return SUM if "Send" in name.rpartition(":")[2] else TOWERS
    if scopes.is_addition(name):
        return SUM
    return _OF_SCOPE[scope]


def _gpu_phase(event: Event) -> str:
    """The phase of a kernel or a copy; kernels outside of the scopes are a tower's own.

    A copy between GPUs belongs to the one that sends; the first holds the parameters, if any does.
    """
    direction = copy_direction(event.name)
    if direction == "H2D" or direction == "P2P" and event.plane.endswith(":0"):
        return PARAMETERS
    if direction is not None:
        return SUM
    names = [value for value in event.details.values() if isinstance(value, str)]
    programs = {scopes.program(name) for name in names}
    if programs & {scopes.UPDATE_PROGRAM, scopes.SUM_AND_UPDATE_PROGRAM}:
        return UPDATE
    return next(filter(None, map(_scope_phase, names)), TOWERS)


def _devices_on(
    plane: str, tower_devices: Sequence[str], logical_gpus: Sequence[int]
) -> list[str]:
    """The towers' devices on a GPU such as "/device:GPU:0", in the order of their numbers."""
    gpu = int(plane.rpartition(":")[2])
    first = sum(logical_gpus[:gpu])
    numbers = {int(d.rpartition(":")[2]): d for d in tower_devices if is_gpu(d)}
    return [numbers[n] for n in range(first, first + logical_gpus[gpu]) if n in numbers]
