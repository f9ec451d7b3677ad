"""The anatomy of a step: real steps under TensorFlow's profiler, and where their time goes.

Nothing here is part of a step: without `measure` there is no code, and no operation, to pay for.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf

from towers.app.datasets.batches import Examples, shuffled_batches
from towers.app.diagnosis import phases, plan
from towers.app.diagnosis.phases import Interval, TowerSpan
from towers.app.diagnosis.recording import HOST, Event, operations, read_events, write_chrome_trace
from towers.machine.devices import tower_range
from towers.machine.logical import logical_gpu_counts
from towers.step import TowerStep, scopes
from towers.step.averaging import add_tree
from towers.step.prefetch import prefetched

CHROME_TRACE = "trace.json.gz"

_WARM_UP_STEPS = 5  # the first traces the graphs, the next ones still fill caches
_ROUNDS = 4
_ADDITIONS = "additions"


class Anatomy(NamedTuple):
    """The measured means, over the middle half of the steps ordered by their length.

    seconds: of each of `phases.PHASES`, in a step without the profiler: they add up to it. Phases
        are seen only under the profiler, which costs time for each event that it records: that is
        taken off again, see `phases.unrecorded`.
    step_seconds: of a step without the profiler.
    profiled_seconds: of a step under it.
    num_steps: how many steps of each kind ran.
    batch_size: the global batch.
    spans: when the towers ran, in a step of `seconds`.
    traffic: what a step moves.
    home: the parameters' device.
    """

    seconds: dict[str, float]
    step_seconds: float
    profiled_seconds: float
    num_steps: int
    batch_size: int
    spans: list[TowerSpan]
    traffic: list[plan.Traffic]
    home: str


def full_batches(examples: Examples, batch_size: int, seed: int) -> Iterator[Any]:
    """Epoch after epoch of shuffled global batches, without the last one where it is shorter."""
    full = min(batch_size, examples.num_examples)
    for epoch in itertools.count():
        for batch in shuffled_batches(examples, batch_size, seed, epoch):
            if tf.nest.flatten(batch)[0].shape[0] == full:
                yield batch


def measure(
    step: TowerStep,
    batches: Iterable[tuple],
    directory: Path,
    num_steps: int = 24,
    prefetch_to_devices: bool | None = None,
) -> Anatomy:
    """Measures training steps, which change the model as training does; and leaves the traces.

    Rounds of steps without and with the profiler take turns, so that both see the same machine.

    Additions that are compiled with the update have no time of their own. They are therefore also
    compiled and timed alone; that share of the update counts as the sum. Of both, the fastest runs
    are compared.

    Args:
        step: the towers.
        batches: (x, y) for each step, all of one size, without end.
        directory: gets plugins/profile/, for TensorBoard, and `CHROME_TRACE`: the last round.
        num_steps: how many to measure with the profiler, and as many without: a multiple of 4.
        prefetch_to_devices: see `prefetched`.

    Raises:
        ValueError: the examples are not all of one shape.
    """
    iterator = prefetched(step, batches, to_devices=prefetch_to_devices)
    x, y, *_ = next(iterator)
    example = plan.one_example((x, y))
    _run(step, iterator, _WARM_UP_STEPS)
    additions = _compiled_additions(step)
    seconds: list[float] = []
    measured: list[_MeasuredStep] = []
    sum_seconds: list[float] = []
    each = num_steps // _ROUNDS
    for left in reversed(range(_ROUNDS)):
        # The first step finds its batch ready: it was prefetched beside whatever came before.
        seconds += _run(step, iterator, 1 + each)[1:]
        with tempfile.TemporaryDirectory() as scratch:
            target = directory if left == 0 else Path(scratch)
            events = _record(lambda: _run(step, iterator, 1 + each + 1), target)
            measured += _measured_steps(events, step.tower_devices)[1:]
        sum_seconds += _additions_seconds(additions, each)
    _write_chrome_trace(directory, events, step.tower_devices)
    share = 0.0
    # A tower's end may be noted so late that it hides the update.
    updates = [m.seconds[phases.UPDATE] for m in measured if m.seconds[phases.UPDATE] > 0]
    is_apart = step.policy.add_on_devices or any(scopes.is_addition(e.name) for e in events)
    if updates and not is_apart:
        share = min(sum_seconds) / min(updates)
    usual = [measured[i] for i in phases.typical([sum(m.seconds.values()) for m in measured])]
    profiled = _means([m.seconds for m in usual])
    step_seconds = phases.mean([seconds[i] for i in phases.typical(seconds)])
    unrecorded = phases.unrecorded(profiled, _means([m.events for m in usual]), step_seconds)
    scale = unrecorded[phases.TOWERS] / profiled[phases.TOWERS]
    batch_size = int(tf.nest.flatten(x)[0].shape[0])
    return Anatomy(
        phases.split_update(unrecorded, share),
        step_seconds,
        sum(profiled.values()),
        each * _ROUNDS,
        batch_size,
        phases.mean_spans([m.spans for m in usual], step.tower_devices, scale),
        plan.traffic(step, batch_size, *example),
        step.home,
    )


class _MeasuredStep(NamedTuple):
    """One step under the profiler.

    seconds, events: of each phase; events of the host, which pays for recording them.
    spans: when the towers ran, after the step's begin.
    """

    seconds: dict[str, float]
    events: dict[str, float]
    spans: dict[tuple[int, int], Interval]


def _measured_steps(events: list[Event], tower_devices: list[str]) -> list[_MeasuredStep]:
    in_phases = phases.phase_intervals(events, tower_devices)
    of_towers = _tower_intervals(events, tower_devices)
    assert in_phases[phases.TOWERS] and in_phases[phases.UPDATE], "TowerStep's scopes have changed"
    begins = sorted(event.begin for event in events if event.plane == HOST)
    return [
        _MeasuredStep(
            phases.phase_seconds(in_phases, step),
            phases.phase_events(in_phases, step, begins),
            phases.tower_spans(of_towers, step),
        )
        for step in phases.steps(events)
    ]


def _tower_intervals(
    events: list[Event], tower_devices: list[str]
) -> dict[tuple[int, int], list[Interval]]:
    streams = phases.computing_streams(events, tower_devices, logical_gpu_counts())
    return phases.tower_intervals(events, tower_devices, streams)


def _means(values: list[dict[str, float]]) -> dict[str, float]:
    return {phase: phases.mean([v[phase] for v in values]) for phase in phases.PHASES}


def _record(function: Callable[[], Any], directory: Path) -> list[Event]:
    """The trace of all that runs while a function does."""
    with tf.profiler.experimental.Profile(str(directory)):
        function()
    return operations(read_events(directory))


def _run(step: TowerStep, batches: Iterator[Any], count: int) -> list[float]:
    """The seconds of `count` steps, each from its wait for input on; marks both parts of each."""
    times = [time.perf_counter()]
    for index in range(count):
        with tf.profiler.experimental.Trace(phases.INPUT_MARK):
            batch = next(batches)
        with tf.profiler.experimental.Trace(phases.STEP_MARK, step_num=index, _r=1):
            logs = step.train_batch(**batch._asdict())
            if index == count - 1:
                float(logs["loss"])  # GPUs may still be at work
        times.append(time.perf_counter())
    return [end - begin for begin, end in zip(times, times[1:], strict=False)]


def _compiled_additions(step: TowerStep) -> Callable[[], Any]:
    """The additions that are left to the parameters' device, compiled without the update.

    Adds ones in place of gradients: the same tree, as many bytes.
    """
    compiled = tf.function(add_tree, autograph=False, jit_compile=True)

    @tf.function(autograph=False)
    def add(values: list) -> Any:
        tree = step.reduce(values)
        with tf.device(step.home), tf.name_scope(_ADDITIONS):
            return compiled(tree) if isinstance(tree, tuple) else []

    values = []
    for device in step.tower_devices:
        with tf.device(device):
            variables = step.trainable_variables
            values.append([tf.ones(v.shape, v.dtype) for v in variables])
    for _ in range(_WARM_UP_STEPS):
        add(values)
    return lambda: add(values)


def _additions_seconds(additions: Callable[[], Any], count: int) -> list[float]:
    """The seconds of each of `count` runs of the additions; [0] where there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        events = _record(lambda: [additions() for _ in range(count + 1)], Path(scratch))
    return [e.end - e.begin for e in events if e.name.startswith(f"{_ADDITIONS}/")] or [0.0]


def _write_chrome_trace(directory: Path, events: list[Event], tower_devices: list[str]) -> None:
    """The phases and the towers as its first rows, the threads and the GPUs' streams below."""
    in_phases = phases.phase_intervals(events, tower_devices)
    rows = {phase: in_phases[phase] for phase in phases.PHASES if phase in in_phases}
    for towers, intervals in sorted(_tower_intervals(events, tower_devices).items()):
        rows[f"tower {tower_range(*towers)}"] = intervals
    first = [
        Event("step", name, name, *interval)
        for name, intervals in rows.items()
        for interval in phases.union(intervals)
    ]
    write_chrome_trace(directory / CHROME_TRACE, first, events)
