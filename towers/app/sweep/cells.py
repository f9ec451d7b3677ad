"""The cells of a sweep: global batch x GPU count, x model, x dropout; each a run of train.py."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from towers.resume.run_dir import file_name
from towers.app.config import TrainConfig
from towers.machine.words import plural


class Cell(NamedTuple):
    """One run.

    dropout: None means the model's own rates.
    batch_size: the global batch.
    num_gpus: devices that run towers; logical CPU devices on a machine without GPUs.
    """

    model: str
    dropout: float | None
    batch_size: int
    num_gpus: int

    @property
    def label(self) -> str:
        """"cnn", or "cnn dropout=0.25": what speed-up and picture compare the GPU counts of."""
        return self.model if self.dropout is None else f"{self.model} dropout={self.dropout:g}"

    def config(self, shared: TrainConfig) -> TrainConfig:
        """The cell's run; `shared` holds what all cells have in common."""
        return dataclasses.replace(shared, **self._asdict())


def make_cells(
    models: Sequence[str], dropouts: Sequence[str], batch_sizes: Sequence[str],
    gpu_counts: Sequence[str],
) -> list[Cell]:
    """All cells, in the order in which they run, from the flags' lists.

    Args:
        models: names as --model of train.py takes them.
        dropouts: rates; none means the models' own.
        batch_sizes: global batches.
        gpu_counts: how many devices run towers.

    Raises:
        ValueError: a list is empty, names something twice, or an entry makes no sense.
    """
    return [
        Cell(*values)
        for values in itertools.product(
            _parsed("model", models, str, "a name", "cnn,mlp"),
            _parsed("dropout", dropouts, float, "a number", "0,0.25") if dropouts else [None],
            _parsed("batch_sizes", batch_sizes, int, "a whole number", "64,128,256"),
            _parsed("gpu_counts", gpu_counts, int, "a whole number", "1,2,4,8"),
        )
    ]


def check_cells(cells: Sequence[Cell], shared: TrainConfig) -> None:
    """Refuses what no train.py would take, before any time is spent.

    Raises:
        ValueError: a value makes no sense, or two values contradict each other.
    """
    for argument, values in (
        ("batch_sizes", [cell.batch_size for cell in cells]),
        ("gpu_counts", [cell.num_gpus for cell in cells]),
    ):
        if min(values) < 1:
            raise ValueError(f"{argument} ({min(values)}) must be at least 1 each.")
    if shared.epochs < 1:
        raise ValueError(f"epochs ({shared.epochs}) must be at least 1: a sweep times training.")
    most = max(cell.num_gpus for cell in cells)
    if shared.num_towers is not None and shared.num_towers < most:
        raise ValueError(
            f"num_towers ({shared.num_towers}) is below the largest of gpu_counts ({most}), "
            f"whose devices would have no tower. Use num_towers={most} or more."
        )
    for cell in cells:
        cell.config(shared)


def train_flags(config: TrainConfig) -> list[str]:
    """The command line of train.py that gives this configuration."""
    return [f"--{name}={value}" for name, value in config.given().items()]


def cell_name(label: str, batch_size: int, num_gpus: int) -> str:
    """The name of a cell's directory: "cnn_dropout_0.25-batch128-gpus2"."""
    return f"{file_name(label)}-batch{batch_size}-gpus{num_gpus}"


def _parsed(
    argument: str, texts: Sequence[str], kind: Callable[[str], Any], what: str, example: str
) -> list[Any]:
    given = ",".join(texts)
    if not texts:
        raise ValueError(f"`{argument}` is empty; give a list such as {argument}={example}.")
    values = []
    for text in texts:
        try:
            value = kind(text)
        except ValueError:
            value = ""
        if value == "":
            raise ValueError(
                f"{argument} ({given}): {text!r} is not {what}; give a list such as "
                f"{argument}={example}."
            )
        if value in values:
            raise ValueError(f"{argument} ({given}) names {value} twice; name it once.")
        values.append(value)
    return values


class Machine(NamedTuple):
    """The machine of a cell's run.

    gpu: the GPU's name; None where towers ran on logical CPU devices.
    cores: the processor cores that the process may use.
    """

    gpu: str | None
    cores: int

    def __str__(self) -> str:
        cores = f"{self.cores} {plural('core', self.cores)}"
        return self.gpu or f"logical CPU devices on {cores}"

    def devices(self, count: int) -> str:
        """"2 GPUs", "1 device"."""
        return f"{count} {plural('GPU' if self.gpu else 'device', count)}"
