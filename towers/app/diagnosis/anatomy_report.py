"""The anatomy of a step in words: a table with bars, what bounds the step, and what to change."""

from pathlib import Path

import keras
from rich.text import Text

from towers.app.diagnosis.anatomy import CHROME_TRACE, Anatomy, full_batches, measure
from towers.app.diagnosis.phases import (
    HOST_OVERHEAD,
    INPUT,
    PARAMETERS,
    PHASES,
    RECORDING_SECONDS,
    SUM,
    TOWERS,
    UPDATE,
    Interval,
    length,
    union,
)
from towers.machine.devices import count_cores, is_gpu
from towers.app.reporting.formats import format_bytes
from towers.app.reporting.report import Report, labelled
from towers.app.training.build import Run

_BAR_WIDTH = 30
_WORTH_A_WORD = 0.15  # a phase's share of the step, from which it is named beside the towers
_ONE_AFTER_ANOTHER = 0.75  # towers at once, of those that could be, below which they wait
_UNEVEN = 1.25  # the slowest tower's time over the fastest one's


def show_anatomy(run: Run, directory: Path, out: Report) -> None:
    """Measures the run's training steps, with full batches only, and shows what was found.

    Args:
        run: its variables change as in training; nothing of it is saved.
        directory: gets the traces.
        out: where the lines go.
    """
    batches = full_batches(run.train, run.batch_size, run.config.seed)
    ahead = run.config.prefetch_to_devices
    anatomy = measure(run.step, batches, directory, prefetch_to_devices=ahead)
    for line in lines(anatomy, directory):
        out.line(line)


def lines(anatomy: Anatomy, directory: Path) -> list[Text]:
    """All that there is to say.

    Args:
        anatomy: what was measured.
        directory: where its traces are.
    """
    bounds, *others = advice(anatomy)
    return [
        *map(Text, table(anatomy)),
        labelled("Bottleneck", f" {bounds}"),
        *(labelled("", f" {other}") for other in others),
        labelled("Traces", f" {directory / CHROME_TRACE} for chrome://tracing or ui.perfetto.dev;"),
        labelled("", f" {directory} for tensorboard --logdir, with tensorboard-plugin-profile"),
    ]


def table(anatomy: Anatomy) -> list[str]:
    """A line for each phase, with its time, its share, a bar, and the bytes that it moves."""
    total = sum(anatomy.seconds.values())
    moved = {
        PARAMETERS: sum(row.parameters + row.inputs for row in anatomy.traffic),
        SUM: sum(row.gradients + row.predictions for row in anatomy.traffic),
    }
    names = {phase: phase_name(phase, anatomy) for phase in PHASES}
    width = max(map(len, names.values()))
    rows = [f"{'phase of a step':<{width}}       ms  share"]
    for phase in PHASES:
        share = anatomy.seconds[phase] / total
        bar = "=" * round(_BAR_WIDTH * share)
        bytes_moved = format_bytes(moved[phase]) if moved.get(phase) else ""
        rows.append(
            f"{names[phase]:<{width}} {1e3 * anatomy.seconds[phase]:8.2f}   {share:4.0%}"
            f"  {bar:<{_BAR_WIDTH}}  {bytes_moved}".rstrip()
        )
    rate = anatomy.batch_size / anatomy.step_seconds
    return [
        *rows,
        f"{'all phases':<{width}} {1e3 * total:8.2f}   a step without the profiler, "
        f"{rate:,.0f} examples/s",
        _profiler_line(anatomy),
        _towers_line(anatomy),
    ]


def advice(anatomy: Anatomy) -> list[str]:
    """The phase that bounds the step, with what to change; and the next one, where it counts."""
    total = sum(anatomy.seconds.values())
    first, second = sorted(PHASES, key=anatomy.seconds.__getitem__, reverse=True)[:2]
    shares = {phase: anatomy.seconds[phase] / total for phase in (first, second)}
    found = [f"{phase_name(first, anatomy)}, {shares[first]:.0%}: {_remedy(first, anatomy)}"]
    if shares[second] >= _WORTH_A_WORD:
        found.append(
            f"then {phase_name(second, anatomy)}, {shares[second]:.0%}: {_remedy(second, anatomy)}"
        )
    return found


def phase_name(phase: str, anatomy: Anatomy) -> str:
    """A phase in words."""
    return {
        INPUT: "waiting for input",
        PARAMETERS: "parameters and shards to devices",
        TOWERS: "towers' forward and backward",
        SUM: f"gradients to {anatomy.home}, their sum",
        UPDATE: f"update on {anatomy.home}",
        HOST_OVERHEAD: "host overhead",
    }[phase]


def towers_at_once(anatomy: Anatomy) -> float:
    """The mean number of towers under way while any is; on a GPU all its towers count as one."""
    spans = [Interval(span.begin, span.end) for span in anatomy.spans]
    return length(spans) / length(union(spans))


def _profiler_line(anatomy: Anatomy) -> str:
    longer = anatomy.profiled_seconds - anatomy.step_seconds
    difference = f"{1e3 * abs(longer):.2f} ms ({abs(longer) / anatomy.step_seconds:.0%})"
    if longer < 0:
        return f"under the profiler {difference} shorter: all phases are scaled to the step without"
    return (
        f"the profiler adds {difference}, taken off again: at most "
        f"{1e6 * RECORDING_SECONDS:.0f} us for each event, the rest by time"
    )


def _towers_line(anatomy: Anatomy) -> str:
    seconds = [span.end - span.begin for span in anatomy.spans]
    what = "GPUs" if _on_gpus(anatomy) else "towers"
    return (
        f"{towers_at_once(anatomy):.1f} {what} at once, of {_places(anatomy)}; the fastest takes "
        f"{1e3 * min(seconds):.2f} ms, the slowest {1e3 * max(seconds):.2f} ms"
    )


def _remedy(phase: str, anatomy: Anatomy) -> str:
    return {
        INPUT: _input_remedy,
        PARAMETERS: _transfer_remedy,
        TOWERS: _towers_remedy,
        SUM: _transfer_remedy,
        UPDATE: _update_remedy,
        HOST_OVERHEAD: _host_remedy,
    }[phase](anatomy)


def _input_remedy(anatomy: Anatomy) -> str:
    del anatomy
    return (
        "the input pipeline is slower than the step. Make what the data set does for each example "
        "cheaper, or do it once before training; a bigger batch does not help."
    )


def _transfer_remedy(anatomy: Anatomy) -> str:
    remedies = ["a bigger --batch_size (the same bytes for more examples)"]
    if _num_towers(anatomy) > 1:
        remedies.append("fewer towers")
    return _listed(remedies + _variables_on_gpu(anatomy))


def _update_remedy(anatomy: Anatomy) -> str:
    remedies = ["a bigger --batch_size (fewer updates for as many examples)"]
    remedies += _variables_on_gpu(anatomy)
    return _listed([*remedies, "an optimizer with fewer slots for each parameter, such as sgd"])


def _host_remedy(anatomy: Anatomy) -> str:
    remedies = ["a bigger --batch_size (more to compute in each operation)"]
    if _num_towers(anatomy) > _places(anatomy):
        remedies.append(f"fewer towers (--num_towers={_places(anatomy)})")
    return _listed([*remedies, "--jit_compile (fewer operations)"])


def _towers_remedy(anatomy: Anatomy) -> str:
    """Towers should take most of a step: the way on is to compute faster, or more at once."""
    num_towers, places = _num_towers(anatomy), _places(anatomy)
    remedies = []
    if not _on_gpus(anatomy):
        remedies += _towers_per_core(num_towers)
    elif num_towers > places:
        remedies.append(f"fewer towers (--num_towers={places}, as many as run at once)")
    if num_towers <= places and towers_at_once(anatomy) < _ONE_AFTER_ANOTHER * places:
        remedies.append("a bigger --batch_size (the towers begin one after another)")
    if _is_uneven(anatomy):
        remedies.append(f"a --batch_size that the {num_towers} towers divide (one waits for them)")
    if keras.config.dtype_policy().name == "float32":
        remedies.append("--precision=mixed_bfloat16 (where the device computes it fast)")
    remedies.append("--jit_compile" if _on_gpus(anatomy) else "a GPU")
    return f"where a step's time belongs. To be faster still, {_listed(remedies)}"


def _towers_per_core(num_towers: int) -> list[str]:
    """One or two: which of them is faster differs from model to model, see benchmarks/."""
    one, two = count_cores(), 2 * count_cores()
    return [
        f"{what} (--num_towers={count})"
        for count, what in (
            (one, "one tower a core"), (two, "two towers a core, which convolutions like"),
        )
        if count != num_towers
    ]


def _listed(remedies: list[str]) -> str:
    return f"try {'; or '.join(remedies)}."


def _variables_on_gpu(anatomy: Anatomy) -> list[str]:
    may = _on_gpus(anatomy) and not is_gpu(anatomy.home)
    return ["--variable_device=gpu"] if may else []


def _on_gpus(anatomy: Anatomy) -> bool:
    return is_gpu(anatomy.spans[0].device)


def _num_towers(anatomy: Anatomy) -> int:
    return 1 + max(span.towers[1] for span in anatomy.spans)


def _places(anatomy: Anatomy) -> int:
    """The number of towers that can run at once."""
    devices = len({span.device for span in anatomy.spans})
    return devices if _on_gpus(anatomy) else min(_num_towers(anatomy), count_cores())


def _is_uneven(anatomy: Anatomy) -> bool:
    """Whether some tower takes much longer, and has more examples."""
    seconds = [span.end - span.begin for span in anatomy.spans]
    sizes = {size for row in anatomy.traffic for size in row.examples}
    return len(sizes) > 1 and max(seconds) > _UNEVEN * min(seconds)
