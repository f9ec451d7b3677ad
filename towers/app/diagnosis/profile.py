"""Measures for --profile where the time of a step goes, by leaving parts of the step out.

    a step with its input          | waiting for input | gradients .......... | update |
    a step on one batch                                | gradients .......... | update |
    the gradients alone                                | gradients .......... |

The gradients of half a batch take as long as on twice the devices. The gradients of twice the
batch show how much faster a larger batch would be.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from towers.app.datasets.batches import Examples, shuffled_batches
from towers.app.reporting.report import Report, labelled
from towers.app.training.build import Run
from towers.machine.devices import count_cores, is_gpu
from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.step import TowerStep
from towers.step.prefetch import prefetched

WAITING, GRADIENTS, UPDATE = "waiting for input", "gradients", "update"

_ROUNDS = 5
_WARM_UP_SECONDS = 0.2  # before each measurement: drains buffers, fills caches
_SECONDS = 0.4  # for each measurement in each round
_TRACED_STEPS = 3
_BAR_WIDTH = 30
_WORTHWHILE = 1.2  # times the examples per second


class Profile(NamedTuple):
    """Holds the measured seconds, each the median over the rounds.

    batch_size: the global batch, B.
    whole: a training step with its input.
    input: reading and placing a batch, without a step.
    step: a training step on a batch that is already placed.
    gradients: the averaged gradients of a batch, by its size: B, B // 2, and also 2 * B if there
        are enough examples and enough memory.
    """

    batch_size: int
    whole: float
    input: float
    step: float
    gradients: dict[int, float]

    @property
    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part of a step; they add up to `whole`."""
        waiting = max(0.0, self.whole - self.step)
        update = max(0.0, self.whole - waiting - self.gradients[self.batch_size])
        return {WAITING: waiting, GRADIENTS: self.whole - waiting - update, UPDATE: update}

    def speedup(self, shard: float, batch: float) -> float | None:
        """Returns the factor on the examples per second for other sizes; None if not measured.

        Args:
            shard: a tower's examples, as a multiple of the present number.
            batch: the global batch, as a multiple of the present one; its input grows equally.
        """
        gradients = self.gradients.get(int(shard * self.batch_size))
        if gradients is None:
            return None
        step = self.step - self.gradients[self.batch_size] + gradients
        return batch * self.whole / max(step, batch * self.input)


def show_profile(run: Run, directory: Path, out: Report) -> None:
    """Measures the run's training steps and shows where their time goes; changes no variable.

    Args:
        run: a run that has not begun.
        directory: the directory for a trace by `tf.profiler`.
        out: the report that prints the lines.
    """
    step, seed = run.step, run.config.seed
    step.build_metrics("train", *run.train.specs)
    before = copy_arrays(variables_of(step))
    try:
        profile = measure(
            step, lambda size: full_batches(run.train, size, seed), run.batch_size,
            run.train.num_examples, directory,
        )
    finally:
        assign_arrays(variables_of(step), before, Path("the profile"))
    for line in report(profile, step, directory):
        out.line(line)


def full_batches(examples: Examples, batch_size: int, seed: int) -> Iterator[Any]:
    """Yields shuffled global batches, epoch after epoch, without an uneven last batch."""
    full = min(batch_size, examples.num_examples)
    for epoch in itertools.count():
        for batch in shuffled_batches(examples, batch_size, seed, epoch):
            if tf.nest.flatten(batch)[0].shape[0] == full:
                yield batch


def measure(
    step: TowerStep,
    batches: Callable[[int], Iterator[Any]],
    batch_size: int,
    num_examples: int,
    directory: Path,
) -> Profile:
    """Times steps and parts of steps in turns, so that load affects all; then traces a few steps.

    Args:
        step: the step to measure, which trains its model.
        batches: (size) -> endless batches (x, y) of this size, as `prefetched` takes them.
        batch_size: the global batch.
        num_examples: the number of examples, which no batch can exceed.
        directory: the directory for the trace.
    """
    batch_size = min(batch_size, num_examples)
    ahead = prefetched(step, batches(batch_size))
    given = {
        size: keras.utils.unpack_x_y_sample_weight(next(batches(size)))
        for size in (batch_size // 2, batch_size, 2 * batch_size) if 1 <= size <= num_examples
    }
    acts: dict[Any, Callable[[], Any]] = {
        "input": lambda: next(ahead),  # before "whole", which then finds an empty buffer
        "whole": lambda: step.train_batch(**next(ahead)._asdict()),
        "step": lambda: step.train_batch(*given[batch_size]),
        **{size: partial(step.gradients, *batch) for size, batch in given.items()},
    }
    seconds: dict[Any, list[float]] = {part: [] for part in acts}
    for _ in range(_ROUNDS):
        for part, act in list(acts.items()):
            try:
                seconds[part].append(_seconds(act))
            except (tf.errors.ResourceExhaustedError, tf.errors.CancelledError):
                if part != 2 * batch_size:
                    raise
                del acts[part], seconds[part]  # it needs too much memory
    with tf.profiler.experimental.Profile(str(directory)):
        for number in range(_TRACED_STEPS):
            with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
                acts["whole"]()
        tf.test.experimental.sync_devices()
    found = {part: statistics.median(values) for part, values in seconds.items()}
    whole, read, alone = (found.pop(part) for part in ("whole", "input", "step"))
    return Profile(batch_size, whole, read, alone, found)


def _seconds(act: Callable[[], Any]) -> float:
    """Returns the mean seconds of a call, including the work that it leaves to the devices."""
    for least in (_WARM_UP_SECONDS, _SECONDS):
        begin, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - begin < least:
            act()
            tf.test.experimental.sync_devices()  # as the check for NaN does after each step
            count += 1
    return (time.perf_counter() - begin) / count


def report(profile: Profile, step: TowerStep, directory: Path) -> list[str]:
    """Returns a table of the parts, the bottleneck, and the effect of more GPUs or examples."""
    bound = max(profile.parts, key=profile.parts.__getitem__)
    share = profile.parts[bound] / profile.whole
    return [
        *_table(profile),
        labelled("Bottleneck", f"  {bound}, {share:.0%}: {_remedy(bound, step)}"),
        labelled("2 x GPUs", _more_gpus(profile, step)),
        labelled("2 x batch", _larger_batch(profile)),
        labelled("Trace", f"{directory} for tensorboard --logdir, with tensorboard-plugin-profile"),
    ]


def _table(profile: Profile) -> list[str]:
    lines = [f"{'part of a step':<20}      ms  share"]
    for part, seconds in profile.parts.items():
        share = seconds / profile.whole
        bar = "=" * round(_BAR_WIDTH * share)
        lines.append(f"{part:<20}{1e3 * seconds:8.2f}   {share:4.0%}  {bar}".rstrip())
    rate = profile.batch_size / profile.whole
    lines.append(f"{'whole step':<20}{1e3 * profile.whole:8.2f}         {rate:,.0f} examples/s")
    lines.append(f"{'input without steps':<20}{1e3 * profile.input:8.2f}")
    return lines


def _remedy(part: str, step: TowerStep) -> str:
    on_gpus = is_gpu(step.devices[0])
    if part == WAITING:
        return (
            "the input is slower than the step. Make what the data set does for each example "
            "cheaper, do it once before training, or read in processes: --data_workers=4."
        )
    if part == UPDATE:
        ways = ["a larger --batch_size", "an optimizer with fewer slots, such as sgd"]
        if on_gpus and not is_gpu(step.parameter_device):
            ways += ["--variable_device=gpu", "--strategy=mirrored"]
        return f"fewer or cheaper updates: {', '.join(ways)}."
    ways = [] if step.uses_xla else ["--jit_compile"]
    if keras.config.dtype_policy().name == "float32":
        ways.append("--precision=mixed_bfloat16, where the device computes it fast")
    if not on_gpus:
        ways.append("a GPU")
    faster = f" Faster: {', '.join(ways)}." if ways else ""
    return f"the towers and their average, where a step's time belongs.{faster}"


def _more_gpus(profile: Profile, step: TowerStep) -> str:
    if not is_gpu(step.devices[0]):
        cores = count_cores()
        return (
            "logical CPU devices share the cores and do not tell; here, compare one tower a core "
            f"and two: --num_towers={cores}, --num_towers={2 * cores}"
        )
    speedup = profile.speedup(0.5, 1)
    if speedup is None:
        return "a batch of one example cannot be shared: use a larger --batch_size"
    advice = "" if speedup >= _WORTHWHILE else "; for more, use a larger --batch_size"
    return f"at most {speedup:.1f} times the examples/s{advice}"


def _larger_batch(profile: Profile) -> str:
    speedup = profile.speedup(2, 2)
    if speedup is None:
        return "not measured: there are too few examples, or too little memory"
    size, judgement = 2 * profile.batch_size, "" if speedup >= _WORTHWHILE else ": hardly faster"
    return f"about {speedup:.1f} times the examples/s with --batch_size={size}{judgement}"
