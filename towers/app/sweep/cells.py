"""Makes a sweep's cells: model x dropout x global batch x GPU count; a cell is one training run."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from towers.app.config import TrainConfig
from towers.app.sweep.table import Row


def make_cells(
    models: Sequence[str], dropouts: Sequence[str], batch_sizes: Sequence[str],
    gpu_counts: Sequence[str], shared: TrainConfig,
) -> dict[Row, TrainConfig]:
    """Returns all cells in running order: the row without figures -> the run's configuration.

    Args:
        models, dropouts, batch_sizes, gpu_counts: the texts of the flags; without `dropouts`, each
            model keeps its dropout rates.
        shared: the settings of all cells.

    Raises:
        ValueError: a list is empty, has a value twice, or has a value that train.py rejects.
    """
    whole = "whole numbers from 1 on"
    axes = [
        _parsed("model", models, str, "names", "cnn,mlp"),
        _parsed("dropout", dropouts, float, "numbers", "0,0.25") if dropouts else [None],
        _parsed("batch_sizes", batch_sizes, int, whole, "64,128,256"),
        _parsed("gpu_counts", gpu_counts, int, whole, "1,2,4,8"),
    ]
    most = max(axes[-1])
    if shared.num_towers is not None and shared.num_towers < most:
        raise ValueError(
            f"num_towers ({shared.num_towers}) is below the largest of gpu_counts ({most}), "
            f"whose devices would have no tower. Use num_towers={most} or more."
        )
    cells = {}
    for model, dropout, batch_size, num_gpus in itertools.product(*axes):
        config = dataclasses.replace(
            shared, model=model, dropout=dropout, batch_size=batch_size, num_gpus=num_gpus
        )
        label = model if dropout is None else f"{model} dropout={dropout:g}"
        towers = shared.num_towers or num_gpus
        cells[Row(label, batch_size, -(-batch_size // towers), num_gpus, towers)] = config
    return cells


def _parsed(
    argument: str, texts: Sequence[str], kind: Callable[[str], Any], what: str, example: str
) -> list[Any]:
    try:
        values = list(map(kind, texts))
    except ValueError:
        values = []
    is_valid = "" not in values and (kind is not int or min(values, default=0) > 0)
    if not (values and is_valid and len({*values}) == len(values)):
        raise ValueError(
            f"{argument} ({','.join(texts)}) must be a list of different {what}, such as "
            f"{argument}={example}."
        )
    return values
