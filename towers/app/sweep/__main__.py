"""Trains at each global batch on each number of GPUs; writes a table, a picture and advice.

    python sweep.py --batch_sizes=64,128,256 --gpu_counts=1,2,4,8 --model=cnn --max_steps=100

Every cell is a run of train.py in a separate process. To continue a stopped sweep, give the same
command again. On a machine without GPUs, the figures are for logical CPU devices. If the package
is installed, `towers-sweep` is this command.
"""

import sys
from pathlib import Path
from typing import Any

from absl import flags

from towers.app import command_line
from towers.app.config import TrainConfig
from towers.app.sweep.run_cells import make_cells, run_sweep
from towers.app.run_dir import RUNS
from towers.resume.directories import file_name

if __name__ != "__main__":
    flags.disclaim_key_flags()  # --help lists the main module's flags, also those defined here

# Flags of train.py, with its defaults.
_SHARED = (
    "dataset data_dir image_size max_steps optimizer learning_rate seed precision device "
    "early_stopping noise_scale"
).split()


def define_flags() -> None:
    """Defines the lists that span the sweep, and the flags that all its cells share."""
    command_line.define_fields(TrainConfig, _SHARED)
    flags.DEFINE_list(
        "model",
        ["cnn"],
        "Models, as --model of train.py takes them. The default trains in minutes.",
    )
    flags.DEFINE_alias("models", "model")
    flags.DEFINE_list(
        "batch_sizes",
        ["64", "128", "256", "512"],
        "Global batches: examples of one update, over all towers. Default: around 128, train.py's.",
    )
    flags.DEFINE_list(
        "gpu_counts",
        ["1", "2"],
        "How many devices run towers; logical CPU devices "
        "on a machine without GPUs. Speed-up is against 1.",
    )
    flags.DEFINE_integer(
        "num_towers",
        None,
        "Towers in every cell, whatever its GPU count: then "
        "the accuracy does not depend on the GPU count. Default: one for each.",
    )
    flags.DEFINE_integer(
        "epochs",
        None,
        "Passes over the training data. Default: 1; with "
        "--max_steps as many as these take, at most train.py's 12.",
        1,
    )
    flags.DEFINE_string(
        "out_dir",
        None,
        "Directory of the sweep: new, empty, or of the same sweep "
        "to continue; more models, batches and GPU counts may be "
        "added. Default: runs/sweep-<models>-<dataset>.",
    )


def sweep(argv: list[str]) -> int:
    """Runs the command line and returns its exit code."""
    if not command_line.parse_flags(argv, __doc__):
        return 0
    given = flags.FLAGS
    epochs = given.epochs or 1
    if given.epochs is None and given.max_steps is not None:
        epochs = TrainConfig.epochs
    values: dict[str, Any] = {name: given[name].value for name in (*_SHARED, "num_towers")}
    shared = TrainConfig(epochs=epochs, **values)
    cells = make_cells(given.model, given.batch_sizes, given.gpu_counts, shared)
    name = file_name(f"sweep-{'-'.join(given.model)}-{given.dataset}")
    out_dir = Path(given.out_dir or RUNS / name).expanduser()
    rows = run_sweep(cells, shared, out_dir)
    if all(row.error for row in rows):
        return command_line.OTHER_FAILURE
    return 0


def main(argv: list[str] | None = None) -> int:
    """Runs a command line, by default the process' arguments, and returns its exit code."""
    define_flags()
    return command_line.exit_code(lambda: sweep(argv or sys.argv))


if __name__ == "__main__":
    sys.exit(main())
