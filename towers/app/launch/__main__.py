"""Starts the workers of one run on this machine, and supervises them until the last has ended.

    python -m towers.launch --workers=4 --gpus_per_worker=2 -- train.py --num_towers=8

After -- give a Python script with its arguments, which every worker runs: train.py, or your own.
If a worker is lost, the others continue the run from its last checkpoint. A later restart takes
the lost worker in again. If the package is installed, `towers-launch` is this command, and
`towers-train` is train.py.
"""

import sys
from pathlib import Path

from absl import flags

from towers.app import command_line
from towers.app.launch.launcher import gpu_shares, launch

if __name__ != "__main__":
    flags.disclaim_key_flags()  # --help lists the main module's flags, also those defined here


def define_flags() -> None:
    """Defines the launcher's flags; the script's flags come after --."""
    flags.DEFINE_integer(
        "workers",
        None,
        "Processes that train together, each with its share of "
        "the towers. No default: each needs its own cores and memory.",
        1,
    )
    flags.DEFINE_integer(
        "gpus_per_worker",
        None,
        "GPUs that each worker sees, out of those in "
        "CUDA_VISIBLE_DEVICES or of all. Default: every worker sees all of them.",
        1,
    )
    flags.DEFINE_integer(
        "max_restarts",
        3,
        "How often the run continues after a worker was lost. "
        "The default outlives bad luck, but not a fault that comes back.",
        0,
    )
    flags.DEFINE_integer(
        "min_workers", 1, "If fewer workers than this are left, the launcher ends with exit code 3."
    )
    flags.DEFINE_float(
        "rejoin_after",
        600.0,
        "Seconds after which a lost worker joins again, at "
        "the next restart. 0: every restart begins with all workers.",
        0.0,
    )


def run(argv: list[str]) -> int:
    """Runs the command line; returns the exit code."""
    end = argv.index("--") if "--" in argv else len(argv)
    own, words = argv[:end], argv[end + 1 :]
    if not command_line.parse_flags(own, __doc__):
        return 0
    given = flags.FLAGS
    if given.workers is None:
        raise ValueError("--workers is missing: say how many, such as --workers=2.")
    shares = gpu_shares(given.workers, given.gpus_per_worker)
    if words and Path(words[0]).name.startswith("python"):
        words = words[1:]  # the workers run with this process' Python
    return launch(words, shares, given.max_restarts, given.min_workers, given.rejoin_after)


def main(argv: list[str] | None = None) -> int:
    """Runs a command line, by default the process' arguments, and returns its exit code."""
    define_flags()
    return command_line.exit_code(lambda: run(argv or sys.argv))


if __name__ == "__main__":
    sys.exit(main())
