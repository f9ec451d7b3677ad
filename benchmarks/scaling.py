"""The cost of a step by towers and machines: the model of docs/scaling.md, and its picture.

    python benchmarks/scaling.py

Fits the constants to machines.csv, compares the model with what was measured there, and draws
what it says of 8 GPUs on each of up to 1,024 machines.
"""

import csv
import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.rounds import groups  # noqa: E402  (found through the line above)

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "images" / "scaling.png"
LARGE = 2e6  # bytes; a tensor of that size is exchanged by itself (towers/step/exchange.py)
PASSES = {"SGD": 5, "Adam": 7}  # over all parameters: what an update reads and writes
TENSORS = 8  # of which an exchange in machines.csv consists

# Assumptions: no figure of these was measured.
GPU_MS = {"cnn": 4.0, "mlp41m": 8.0, "gru": 8.0, "resnet50": 30.0}  # a step of the batch below
GPUS = 8  # of a machine, each with a link of its own to the CPU's memory
GPU_LINK = 10e9  # bytes per second, of memory that is not pinned
PEERS = {"PCIe": 20e9, "NVLink": 200e9}  # bytes per second from GPU to GPU; see the page
CPU_MEMORY = 100e9  # bytes per second that a server's cores update at: half of an EPYC 7003's 205
GPU_MEMORY = 1e12  # bytes per second that a GPU updates at: half of an A100's 2,039
MESSAGE = 1e-4  # seconds of a message, and of a start; see the page for what they take here
LINKS = (10, 100, 400)  # Gbit/s of a machine
MACHINES = 2 ** np.arange(11)


@dataclass(frozen=True)
class Size:
    """A model's size.

    parameters: bytes of the trainable ones. sums: how many are exchanged one by one; two small
        gathers, of the batch's fingerprint and the metrics' predictions, count as one more.
    passes: of an update. batch_size: of the benchmark; in the picture, of each GPU.
    """

    parameters: float
    sums: int
    passes: int
    batch_size: int


@dataclass(frozen=True)
class Constants:
    """The constants of one machine.

    start: seconds of a sum, however small. message: of each message. wire, memory: bytes per
    second that go through the network, and through additions and the update.
    """

    start: float
    message: float
    wire: float
    memory: float


def exchange_seconds(constants: Constants, num_workers: float, size: float, sums: int) -> Any:
    """2 (W-1) messages for each sum; (W-1)/W of all bytes leave, twice, and W slices are added."""
    others = num_workers - 1
    sent = 2 * others / num_workers * size
    added = 3 * others / num_workers * size
    each = np.where(others > 0, constants.start, 0.0) + 2 * others * constants.message
    return sums * each + sent / constants.wire + added / constants.memory


def update_seconds(constants: Constants, size: Size, gradients: float = 1) -> float:
    """One pass over memory: the update, and each further tower's gradients."""
    return (size.passes + gradients - 1) * size.parameters / constants.memory


def gpu_step(
    constants: Constants, size: Size, compute: float, num_machines: Any, peer: str | None = "PCIe"
) -> Any:
    """Seconds of a step of GPUS GPUs on each of W machines: the sum of all that happens.

    peer: what GPUs send sums to each other by, a level of the tree at a time, all links at once;
    None: all send theirs to the CPU, which adds them.
    """
    transfers = 2 * size.parameters / GPU_LINK  # parameters down, a sum up, all links at once
    if peer is not None:
        transfers += math.ceil(math.log2(GPUS)) * size.parameters / PEERS[peer]
    return (
        compute + transfers + update_seconds(constants, size, 1 if peer else GPUS)
        + exchange_seconds(constants, num_machines, size.parameters, size.sums)
    )


def copies_step(size: Size, compute: float, peer: str) -> float:
    """Seconds of a step of one machine's GPUS GPUs, each with a copy of the parameters.

    Each receives its slice of the others' gradients, and the others' slices of the sum.
    """
    slices = 2 * (GPUS - 1) / GPUS * size.parameters / PEERS[peer]
    return compute + slices + size.passes * size.parameters / GPU_MEMORY


def linked(link: float) -> Constants:
    """The assumed ones, with a network of so many Gbit/s."""
    return Constants(MESSAGE, MESSAGE, link / 8 * 1e9, CPU_MEMORY)


def size_of(name: str) -> Size:
    """A workload's, from its model."""
    from benchmarks.workloads import WORKLOADS  # imports TensorFlow

    workload = WORKLOADS[name]()
    counts = [4 * int(np.prod(v.shape)) for v in workload.build().trainable_variables]
    large = sum(count >= LARGE for count in counts)
    passes = PASSES[type(workload.optimizer()).__name__]
    return Size(sum(counts), large + (large < len(counts)) + 1, passes, workload.batch_size)


def exchanges(rows: Iterable[Mapping[str, str]]) -> dict[tuple[int, float], float]:
    """{(W, bytes): seconds}, the medians of machines.csv."""
    return {
        (int(group[0]["num_devices"]), 1e6 * float(group[0]["workload"].split()[0])):
        statistics.median(float(row["value"]) for row in group) / 1e3
        for group in groups(rows) if group[0]["measure"] == "ms"
    }


def fit(measured: Mapping[tuple[int, float], float], memory: float, cores: int) -> Constants:
    """Fits by least squares of relative errors; workers take turns on the cores."""
    left, right = [], []
    for (num_workers, size), seconds in measured.items():
        turns = num_workers / min(num_workers, cores)
        units = [
            turns * exchange_seconds(constants, num_workers, size, sums_of(size))
            for constants in (
                Constants(1, 0, np.inf, np.inf), Constants(0, 1, np.inf, np.inf),
                Constants(0, 0, 1, np.inf), Constants(0, 0, np.inf, memory),
            )
        ]
        left.append([unit / seconds for unit in units[:3]])
        right.append(1 - units[3] / seconds)
    start, message, per_byte = np.linalg.lstsq(np.array(left), np.array(right), rcond=None)[0]
    return Constants(float(start), float(message), float(1 / per_byte), memory)


def sums_of(size: float) -> int:
    """The number of sums in an exchange of so many bytes in machines.csv."""
    return TENSORS if size / TENSORS >= LARGE else 1


def step_times(rows: Iterable[Mapping[str, str]], size: Size) -> dict[str, float]:
    """{contender: median seconds of a step} of one workload's part "scaling"."""
    found: dict[str, float] = {}
    for group in groups(rows):
        values = [[size.batch_size / float(row[key]) for row in group]
                  for key in ("value", "peer_value")]
        alone = statistics.median(values[0])
        found[group[0]["contender"]] = alone
        found[group[0]["peer"]] = alone * float(group[0]["median_ratio"])  # taken within a round
    return found


def predict(constants: Constants, size: Size, compute: float, who: str, cores: int) -> float:
    """Seconds of a step of "4 towers" in one process, or of "4 workers" that share the cores.

    compute: seconds of the whole batch on all cores.
    """
    count = int(who.split()[0])
    if "tower" in who:
        return compute + update_seconds(constants, size, count)
    each = update_seconds(constants, size) + float(exchange_seconds(
        constants, count, size.parameters, size.sums
    ))
    return compute + count / min(count, cores) * each


def draw(target: Path, constants: Constants, sizes: Mapping[str, Size]) -> None:
    """Draws the share of its time that a GPU computes, by machines; a panel for each model."""
    from towers.app.reporting.charts import COLORS, figure_file, style_axes

    note = (f"A model, not a measurement, of {GPUS} GPUs on each machine with a fixed batch for "
            f"each GPU. Assumed: {GPU_LINK / 1e9:.0f} GB/s to a GPU,\n"
            f"{PEERS['PCIe'] / 1e9:.0f} GB/s between GPUs, {CPU_MEMORY / 1e9:.0f} GB/s for the "
            f"update, {1e3 * MESSAGE:.1f} ms for each message. The dashed line assumes the\n"
            f"network measured on 2 CPU cores: {8 * constants.wire / 1e9:.1f} Gbit/s, "
            f"{1e3 * constants.start:.1f} ms for each sum, {1e3 * constants.message:.1f} ms for "
            "each message.")
    with figure_file(target, 9.0, 6.6, "Share of a step during which GPUs compute", note) as figure:
        panels = figure.subplots(2, 2, sharex=True, sharey=True)
        for axes, (name, size) in zip(panels.flat, sizes.items(), strict=True):
            compute = GPU_MS[name] / 1e3
            title = f"{name}: {size.parameters / 1e6:.0f} MB, {GPU_MS[name]:.0f} ms (assumed)"
            style_axes(axes, title, "", "")
            lines = [(f"{link} Gbit/s", linked(link), color, "-")
                     for link, color in zip(LINKS, COLORS, strict=False)]
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


def main() -> None:
    """Prints the constants and the comparison; draws the picture."""
    with (RESULTS / "machines.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    cores = int(rows[-1]["cores"])
    sizes = {name: size_of(name) for name in GPU_MS}
    scaled = {}
    for name, size in sizes.items():
        chosen = [row for row in rows if row["workload"] == name and row["contender"] == "1 tower"]
        if chosen:
            scaled[name] = step_times(chosen, size)
    most = max(scaled, key=lambda name: sizes[name].parameters)  # where the update is no noise
    alone = scaled[most]["1 tower"] - scaled[most]["limit"]
    memory = sizes[most].passes * sizes[most].parameters / alone
    constants = fit(exchanges(rows), memory, cores)
    print(f"start {1e3 * constants.start:.2f} ms, message {1e3 * constants.message:.2f} ms, "
          f"wire {constants.wire / 1e9:.2f} GB/s, memory {memory / 1e9:.2f} GB/s")
    for (num_workers, count), seconds in exchanges(rows).items():
        turns = num_workers / min(num_workers, cores)
        model = turns * exchange_seconds(constants, num_workers, count, sums_of(count))
        print(f"{num_workers} workers, {count / 1e6:g} MB: model {1e3 * model:.0f} ms, "
              f"measured {1e3 * seconds:.0f} ms")
    for name, times in scaled.items():
        base = f"{cores} towers"  # one a core
        if base not in times:
            continue
        compute = times[base] - update_seconds(constants, sizes[name], cores)
        for who in sorted(times.keys() - {"limit", "1 tower"}):
            model = predict(constants, sizes[name], compute, who, cores)
            print(f"{name}, {who}: model {1e3 * model:.0f} ms, measured {1e3 * times[who]:.0f} ms")
    for name, size in sizes.items():
        for link in LINKS:
            compute = GPU_MS[name] / 1e3
            share = compute / gpu_step(linked(link), size, compute, MACHINES)
            some = ", ".join(f"{n:,}: {100 * s:.0f}%" for n, s in zip(MACHINES, share, strict=True))
            print(f"{name}, {link} Gbit/s, machines {some}")
    for name, size in sizes.items():
        compute = GPU_MS[name] / 1e3
        shares = [compute / gpu_step(linked(100), size, compute, 1, peer)
                  for peer in (None, *PEERS)]
        print(f"{name}, one machine: the CPU adds {100 * shares[0]:.0f}%, " + ", ".join(
            f"GPUs over {peer} {100 * share:.0f}%"
            for peer, share in zip(PEERS, shares[1:], strict=True)
        ), *(f"copies over {peer} {100 * compute / copies_step(size, compute, peer):.0f}%"
             for peer in PEERS), sep=", ")
    draw(PICTURE, constants, sizes)


if __name__ == "__main__":
    main()
