"""Computes the cost of a step by towers and machines: the model of docs/scaling.md.

    python benchmarks/scaling.py

It fits the constants to the rows of machines.py in results.csv, compares the model with the measured steps, and draws the
predicted steps of 8 GPUs on each of up to 1,024 machines.
"""

import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rounds import RESULTS, group_comparisons, read_csv

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
LARGE = 2e6  # bytes; a tensor of at least this size is sent alone (towers/step/exchange.py)
PASSES = {"SGD": 5, "Adam": 7}  # how often an update reads or writes all parameters' bytes
NUM_TENSORS = 8  # in an exchange of machines.py

# Assumptions, which are not measured. docs/scaling.md has their sources.
GPU_MS = {"cnn": 4.0, "mlp41m": 8.0, "gru": 8.0, "resnet50": 30.0}  # a step of one GPU's batch
GPUS = 8  # GPUs of a machine, each with its own link to the CPU's memory
GPU_LINK = 10e9  # bytes per second between CPU and GPU, without pinned memory
PEERS = {"PCIe": 20e9, "NVLink": 200e9}  # bytes per second from GPU to GPU
CPU_MEMORY = 100e9  # bytes per second of an update on a CPU: half of an EPYC 7003's 205
GPU_MEMORY = 1e12  # bytes per second of an update on a GPU: half of an A100's 2,039
MESSAGE = 1e-4  # seconds of a message, and of a sum's start
LINKS = (10, 100, 400)  # Gbit/s of a machine
MACHINES = 2 ** np.arange(11)


@dataclass(frozen=True)
class Size:
    """The size of a model.

    parameters: bytes of the trainable parameters.
    sums: number of sums in a step's exchange. The two small gathers (the batch's fingerprint and
        the metrics' predictions) count as one more sum.
    passes: how often the update reads or writes all parameters.
    batch_size: the benchmark's global batch; in the picture, the batch of each GPU.
    """

    parameters: float
    sums: int
    passes: int
    batch_size: int


@dataclass(frozen=True)
class Constants:
    """The constants of one machine.

    start: seconds that each sum takes in addition to its messages.
    message: seconds of each message.
    wire: bytes per second through the network.
    memory: bytes per second through additions and the update.
    """

    start: float
    message: float
    wire: float
    memory: float


def exchange_seconds(constants: Constants, num_workers: float, size: float, sums: int) -> Any:
    """Returns the seconds to add `size` bytes over W workers.

    Each sum takes 2 (W-1) messages. A worker sends (W-1)/W of all bytes twice, and adds W slices.
    """
    others = num_workers - 1
    sent = 2 * others / num_workers * size
    added = 3 * others / num_workers * size
    per_sum = np.where(others > 0, constants.start, 0.0) + 2 * others * constants.message
    return sums * per_sum + sent / constants.wire + added / constants.memory


def update_seconds(constants: Constants, size: Size, gradients: float = 1) -> float:
    """Returns the seconds of the update and of adding that many towers' gradients."""
    return (size.passes + gradients - 1) * size.parameters / constants.memory


def gpu_step(
    constants: Constants, size: Size, compute: float, num_machines: Any, peer: str | None = "PCIe"
) -> Any:
    """Returns the seconds of a step of 8 GPUs on each machine, with all parts one after another.

    Args:
        constants: the constants of a machine.
        size: the model's size.
        compute: seconds for which a GPU computes.
        num_machines: a number or an array.
        peer: the link between GPUs, over which they add in a tree; None if the CPU adds.
    """
    transfers = 2 * size.parameters / GPU_LINK  # parameters down, a sum up, on all links at once
    if peer is not None:
        transfers += math.ceil(math.log2(GPUS)) * size.parameters / PEERS[peer]
    return (
        compute
        + transfers
        + update_seconds(constants, size, 1 if peer else GPUS)
        + exchange_seconds(constants, num_machines, size.parameters, size.sums)
    )


def copies_step(size: Size, compute: float, peer: str) -> float:
    """Returns the seconds of a step of one machine, whose GPUs have copies of the parameters.

    Each GPU receives its slice of the others' gradients, and the others' slices of the sum.
    """
    slices = 2 * (GPUS - 1) / GPUS * size.parameters / PEERS[peer]
    return compute + slices + size.passes * size.parameters / GPU_MEMORY


def assumed_constants(link: float) -> Constants:
    """Returns the assumed constants with a network of `link` Gbit/s."""
    return Constants(MESSAGE, MESSAGE, link / 8 * 1e9, CPU_MEMORY)


def model_size(name: str) -> Size:
    """Builds the model of a workload and returns its size."""
    from benchmarks.workloads import WORKLOADS  # imports TensorFlow

    workload = WORKLOADS[name]()
    counts = [4 * int(np.prod(v.shape)) for v in workload.build().trainable_variables]
    large = sum(count >= LARGE for count in counts)
    passes = PASSES[type(workload.optimizer()).__name__]
    return Size(sum(counts), large + (large < len(counts)) + 1, passes, workload.batch_size)


def read_exchanges(rows: Iterable[Mapping[str, str]]) -> dict[tuple[int, float], float]:
    """Returns the median exchange times of machines.py: {(W, bytes): seconds}."""
    return {
        (
            int(group[0]["num_devices"]),
            1e6 * float(group[0]["workload"].split()[0]),
        ): statistics.median(float(row["value"]) for row in group) / 1e3
        for group in group_comparisons(rows)
        if group[0]["measure"] == "ms" and group[0]["workload"].endswith(" MB")
    }


def fit(measured: Mapping[tuple[int, float], float], memory: float, cores: int) -> Constants:
    """Fits the constants by least squares of relative errors; workers take turns on the cores."""
    left, right = [], []
    for (num_workers, size), seconds in measured.items():
        turns = num_workers / min(num_workers, cores)
        units = [
            turns * exchange_seconds(constants, num_workers, size, num_sums(size))
            for constants in (
                Constants(1, 0, np.inf, np.inf),
                Constants(0, 1, np.inf, np.inf),
                Constants(0, 0, 1, np.inf),
                Constants(0, 0, np.inf, memory),
            )
        ]
        left.append([unit / seconds for unit in units[:3]])
        right.append(1 - units[3] / seconds)
    start, message, per_byte = np.linalg.lstsq(np.array(left), np.array(right), rcond=None)[0]
    return Constants(float(start), float(message), float(1 / per_byte), memory)


def num_sums(size: float) -> int:
    """Returns the number of sums in an exchange of machines.py."""
    return NUM_TENSORS if size / NUM_TENSORS >= LARGE else 1


def read_steps(rows: Iterable[Mapping[str, str]], name: str, batch_size: int) -> dict[str, float]:
    """Returns a workload's median seconds of a step in part "scaling": {contender: seconds}."""
    found: dict[str, float] = {}
    chosen = [row for row in rows if row["workload"] == name and row["contender"] == "1 tower"]
    for group in group_comparisons(chosen):
        alone = statistics.median(batch_size / float(row["value"]) for row in group)
        found["1 tower"] = alone
        found[group[0]["peer"]] = alone * float(group[0]["median_ratio"])  # taken within a round
    return found


def predict(constants: Constants, size: Size, compute: float, contender: str, cores: int) -> float:
    """Returns the seconds of a step of "4 towers" in one process, or of "4 workers".

    compute: seconds in which all cores compute the gradients of the global batch.
    """
    count = int(contender.split()[0])
    if "tower" in contender:
        return compute + update_seconds(constants, size, count)
    rest = update_seconds(constants, size) + float(
        exchange_seconds(constants, count, size.parameters, size.sums)
    )
    return compute + count / min(count, cores) * rest


def draw(target: Path, constants: Constants, sizes: Mapping[str, Size]) -> None:
    """Draws the share of a step in which a GPU computes, by machines, with one panel per model."""
    from towers.app.reporting.charts import figure_file

    note = (
        f"A model, not a measurement, of {GPUS} GPUs on each machine with a fixed batch for "
        f"each GPU. Assumed: {GPU_LINK / 1e9:.0f} GB/s to a GPU,\n"
        f"{PEERS['PCIe'] / 1e9:.0f} GB/s between GPUs, {CPU_MEMORY / 1e9:.0f} GB/s for the "
        f"update, {1e3 * MESSAGE:.1f} ms for each message. The dashed line assumes the\n"
        f"network measured on 2 CPU cores: {8 * constants.wire / 1e9:.1f} Gbit/s, "
        f"{1e3 * constants.start:.1f} ms for each sum, {1e3 * constants.message:.1f} ms for "
        "each message."
    )
    with figure_file(target, 9.0, 6.6, "Share of a step during which GPUs compute", note) as figure:
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, (name, size) in zip(panels.flat, sizes.items(), strict=True):
            compute = GPU_MS[name] / 1e3
            title = f"{name}: {size.parameters / 1e6:.0f} MB, {GPU_MS[name]:.0f} ms (assumed)"
            axes.set_title(title)
            lines = [
                (f"{link} Gbit/s", assumed_constants(link), f"C{i}", "-")
                for i, link in enumerate(LINKS)
            ]
            here = replace(constants, memory=CPU_MEMORY)
            lines.append(("measured on 2 cores", here, "#777777", "--"))
            for label, used, color, style in lines:
                share = compute / gpu_step(used, size, compute, MACHINES)
                axes.plot(MACHINES, 100 * share, style, color=color, label=label)
            axes.set_xscale("log", base=2)
            axes.set_xticks(MACHINES[::2], [f"{n:,}" for n in MACHINES[::2]])
            axes.set_ylim(0, 100)
            axes.yaxis.set_major_formatter("{x:.0f}%")
        for axes in panels[-1]:
            axes.set_xlabel("machines")
        panels[0, 1].legend(loc="upper right", fontsize=9, frameon=False)


def fit_and_compare(sizes: Mapping[str, Size]) -> Constants:
    """Fits the constants to these rows and prints the model beside the measured times."""
    rows = read_csv(RESULTS, "machines")
    cores = int(rows[-1]["cores"])
    steps = {name: read_steps(rows, name, size.batch_size) for name, size in sizes.items()}
    steps = {name: times for name, times in steps.items() if times}
    largest = max(steps, key=lambda name: sizes[name].parameters)  # its update exceeds the noise
    update = steps[largest]["1 tower"] - steps[largest]["limit"]
    memory = sizes[largest].passes * sizes[largest].parameters / update
    constants = fit(read_exchanges(rows), memory, cores)
    print(
        f"start {1e3 * constants.start:.2f} ms, message {1e3 * constants.message:.2f} ms, "
        f"wire {constants.wire / 1e9:.2f} GB/s, memory {memory / 1e9:.2f} GB/s"
    )
    for (num_workers, count), seconds in read_exchanges(rows).items():
        turns = num_workers / min(num_workers, cores)
        model = turns * exchange_seconds(constants, num_workers, count, num_sums(count))
        print(
            f"{num_workers} workers, {count / 1e6:g} MB: model {1e3 * model:.0f} ms, "
            f"measured {1e3 * seconds:.0f} ms"
        )
    for name, times in steps.items():
        base = f"{cores} towers"  # the model takes its computation from one tower per core
        if base not in times:
            continue
        compute = times[base] - update_seconds(constants, sizes[name], cores)
        for contender in sorted(times.keys() - {"limit", "1 tower"}):
            model = predict(constants, sizes[name], compute, contender, cores)
            print(
                f"{name}, {contender}: model {1e3 * model:.0f} ms, "
                f"measured {1e3 * times[contender]:.0f} ms"
            )
    return constants


def main() -> None:
    """Prints the constants, the comparison and the predictions; draws the picture."""
    sizes = {name: model_size(name) for name in GPU_MS}
    constants = fit_and_compare(sizes)
    for name, size in sizes.items():
        compute = GPU_MS[name] / 1e3
        for link in LINKS:
            shares = compute / gpu_step(assumed_constants(link), size, compute, MACHINES)
            print(
                f"{name}, {link} Gbit/s, machines "
                + ", ".join(
                    f"{n:,}: {share:.0%}" for n, share in zip(MACHINES, shares, strict=True)
                )
            )
        one = {"the CPU adds": gpu_step(assumed_constants(100), size, compute, 1, None)}
        for peer in PEERS:
            one[f"GPUs over {peer}"] = gpu_step(assumed_constants(100), size, compute, 1, peer)
            one[f"copies over {peer}"] = copies_step(size, compute, peer)
        print(
            f"{name}, one machine: "
            + ", ".join(f"{text} {compute / float(seconds):.0%}" for text, seconds in one.items())
        )
    draw(PICTURE, constants, sizes)


if __name__ == "__main__":
    main()
