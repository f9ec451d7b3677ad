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

from towers.app.datasets.batches import Examples
from towers.resume.epoch import Epoch
from towers.app.reporting.report import Report, labelled, slowest_line
from towers.app.training.build import Run
from towers.app.training.device_speeds import seconds_per_tower
from towers.divide.tower_step import TowerStep
from towers.machine.devices import count_cores, is_gpu
from towers.resume.snapshot import assign_arrays, copy_arrays, variables_of
from towers.divide.prefetch import prefetched
from towers.step.structures import Structure

WAITING, GRADIENTS, UPDATE = "waiting for input", "gradients", "update"
_REMEDIES = {
    WAITING: "the input is slower than the step. Make what the data set does for each example "
    "cheaper, do it once before training, or read in processes: --data_workers=4.",
    GRADIENTS: "the towers compute. This is useful work. Faster: --jit_compile, "
    "--precision=mixed_bfloat16 where the device computes it fast, or a GPU.",
    UPDATE: "fewer or cheaper updates: a larger --batch_size, an optimizer with fewer slots, such "
    "as sgd, or, with GPUs, --variable_device=gpu or --strategy=mirrored.",
}

_ROUNDS = 5
_WARM_UP_SECONDS = 0.2  # before each measurement: drains buffers, fills caches
_SECONDS = 0.4  # for each measurement in each round


class Profile(NamedTuple):
    """Holds the measured seconds, each the median over the rounds."""

    batch_size: int  # the global batch, B
    whole: float  # a training step with its input
    input: float  # reading and placing a batch, without a step
    step: float  # a training step on a batch that is already placed
    gradients: dict[int, float]  # by batch size: B // 2, B, and 2 * B if data and memory suffice
    noise: float = 0.0  # by how much the measurements of one step differ; no part below it is known

    @property
    def parts(self) -> dict[str, float]:
        """Returns the seconds of each part of a step; they add up to `whole`."""
        waiting = max(0.0, self.whole - self.step)
        update = max(0.0, self.whole - waiting - self.gradients[self.batch_size])
        return {WAITING: waiting, GRADIENTS: self.whole - waiting - update, UPDATE: update}

    def speedup(self, shard: float, batch: float) -> float | None:
        """Returns the factor on the examples per second for other sizes; None if not measured.

        shard, batch: a tower's examples and the global batch, as multiples of the present numbers.
        """
        gradients = self.gradients.get(int(shard * self.batch_size))
        if gradients is None:
            return None
        step = self.step - self.gradients[self.batch_size] + gradients
        return batch * self.whole / max(step, batch * self.input)


def show_profile(run: Run, directory: Path, out: Report) -> None:
    """Measures a run that has not begun, writes a trace, and restores all variables."""
    step, train = run.step, run.train
    step.build_metrics("train", *train.specs)
    before = copy_arrays(variables_of(step))
    batches = partial(full_batches, train, seed=run.config.seed)
    try:
        profile = measure(step, batches, run.batch_size, train.num_examples, directory)
    finally:
        assign_arrays(variables_of(step), before, Path("the profile"))
    for line in report(profile, step, directory):
        out.line(line)
    # Devices that share the CPU's cores are equally fast, and each is faster alone.
    if len(set(step.tower_devices)) > 1 and not step.policy.shares_memory:
        seconds = run.tower_seconds or seconds_per_tower(
            run.make_step, step.devices, run.config, train, run.batch_size
        )
        out.line(slowest_line(seconds, step.tower_devices))


def full_batches(examples: Examples, batch_size: int, seed: int) -> Iterator[Structure]:
    """Yields shuffled global batches of one size, epoch after epoch."""
    full = min(batch_size, examples.num_examples)
    for epoch in itertools.count():
        for batch in examples.batches(Epoch(batch_size, seed, epoch)):
            if tf.nest.flatten(batch)[0].shape[0] == full:
                yield batch


def measure(
    step: TowerStep,
    batches: Callable[[int], Iterator[Structure]],
    batch_size: int,
    num_examples: int,
    directory: Path,
) -> Profile:
    """Times steps and their parts in turns, so that load affects all; then traces a few steps."""
    batch_size = min(batch_size, num_examples)
    ahead = prefetched(step, batches(batch_size))
    given = {
        size: keras.utils.unpack_x_y_sample_weight(next(batches(size)))
        for size in (batch_size // 2, batch_size, 2 * batch_size)
        if 1 <= size <= num_examples
    }
    acts: dict[str | int, Callable[[], object]] = {
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
        for number in range(3):
            with tf.profiler.experimental.Trace("train", step_num=number, _r=1):
                acts["whole"]()
        tf.test.experimental.sync_devices()
    found = {part: statistics.median(values) for part, values in seconds.items()}
    noise = max(
        statistics.median(abs(value - found[part]) for value in seconds[part])
        for part in ("whole", "step", batch_size)
    )
    whole, read, alone = (found.pop(part) for part in ("whole", "input", "step"))
    return Profile(batch_size, whole, read, alone, found, noise)


def _seconds(act: Callable[[], object]) -> float:
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
    whole = profile.whole
    lines = [f"{'part of a step':<20}      ms  share"]
    for part, seconds in profile.parts.items():
        bar = "=" * round(30 * seconds / whole)
        # Parts are differences of measurements, so a part below their noise is unknown, not 0.
        least = max(profile.noise, whole / 100, 1e-5)
        sign, value = ("<", least) if seconds < least else ("", seconds)
        time_shown, share = f"{sign}{1e3 * value:.2f}", f"{sign}{value / whole:.0%}"
        lines.append(f"{part:<20}{time_shown:>8}   {share:>4}  {bar}".rstrip())
    rate = profile.batch_size / whole
    lines.append(f"{'whole step':<20}{1e3 * whole:8.2f}         {rate:,.0f} examples/s")
    lines.append(f"{'input without steps':<20}{1e3 * profile.input:8.2f}")
    bound, longest = max(profile.parts.items(), key=lambda item: item[1])
    bottleneck = f"  {bound}, {longest / whole:.0%}: {_REMEDIES[bound]}"
    more, larger = profile.speedup(0.5, 1), profile.speedup(2, 2)
    gpus = "a batch of one example cannot be shared: use a larger --batch_size"
    if more is not None:
        gpus = f"at most {more:.1f} times the examples/s"
    if not is_gpu(step.devices[0]):
        cores = count_cores()
        gpus = (
            "simulated devices share the cores, so more GPUs cannot be estimated here. Compare one "
            f"tower per core (--num_towers={cores}) with two (--num_towers={2 * cores})"
        )
    batch = "not measured: there are too few examples, or too little memory"
    if larger is not None:
        size = 2 * profile.batch_size
        batch = f"about {larger:.1f} times the examples/s with --batch_size={size}"
    return [
        *lines,
        labelled("Bottleneck", bottleneck),
        labelled("2 x GPUs", gpus),
        labelled("2 x batch", batch),
        labelled("Trace", f"{directory} for tensorboard --logdir, with tensorboard-plugin-profile"),
    ]
