"""Starts the workers of one run on this machine, and sees to them until the last has ended.

    python -m towers.launch --workers=4 --gpus_per_worker=2 -- train.py --num_towers=8

What stands behind -- is a Python script and its arguments, the same for every worker: train.py, or
one of your own. When a worker is lost, the run goes on at its last checkpoint with the others.
Where the package is installed, `towers-launch` is this command, and `towers-train` is train.py.
"""

import os
import sys

from absl import flags

from towers.app import command_line
from towers.app.launch import command, worker_environment
from towers.app.launch.launcher import launch
from towers.machine import nvidia

if __name__ != "__main__":
    flags.disclaim_key_flags()  # --help lists what the main module defines: also by this one


def define_flags() -> None:
    """Defines the launcher's flags; the script's own come behind --."""
    flags.DEFINE_integer("workers", None, "Processes that train together, each with its share of "
                         "the towers. No default: every one needs cores and memory of its own.")
    flags.DEFINE_integer("gpus_per_worker", None, "GPUs that each worker sees, of those in "
                         f"{worker_environment.VARIABLE} or of all. Default: every worker sees "
                         "what there is.")
    flags.DEFINE_integer("max_restarts", 3, "How often the run goes on after a worker was lost, "
                         "each time with one worker less. The default outlives bad luck, but not "
                         "a fault that comes back.")
    flags.DEFINE_boolean("print_tf_config", False, "Print for each of --hosts the line that starts "
                         "its worker, to be typed there; start nothing.")
    flags.DEFINE_list("hosts", [], "With --print_tf_config: the machines' addresses in a private "
                      "network, host:port, the chief's first.")


def run(argv: list[str]) -> int:
    """Does what the command line asks for; returns the exit code.

    Raises:
        ValueError: it makes no sense.
    """
    own, words = command.split(argv)
    if not command_line.parse_flags(own, __doc__):
        return 0
    given = flags.FLAGS
    if given.print_tf_config:
        print_tf_config(given.hosts, words)
        return 0
    if given.hosts:
        raise ValueError(
            "--hosts is for --print_tf_config: workers start on this machine alone. On several, "
            "start one worker on each with the line that --print_tf_config prints."
        )
    if given.workers is None:
        raise ValueError("--workers is missing: say how many, such as --workers=2.")
    for name, least in (("workers", 1), ("gpus_per_worker", 1), ("max_restarts", 0)):
        value: int | None = given[name].value
        if value is not None and value < least:
            raise ValueError(f"--{name} ({value}) must be at least {least}.")
    return launch(words, gpu_shares(given.workers, given.gpus_per_worker), given.max_restarts)


def gpu_shares(num_workers: int, gpus_per_worker: int | None) -> list[str | None]:
    """Each worker's CUDA_VISIBLE_DEVICES; None leaves it as it is."""
    visible = os.environ.get(worker_environment.VARIABLE)
    if gpus_per_worker is None:
        if num_workers > 1 and visible not in ("", "-1") and nvidia.driver_version():
            warning = f"all {num_workers} workers see the same GPUs, and TensorFlow takes all of " \
                "their memory. --gpus_per_worker gives each worker its own."
            print(f"Warning   {warning}", flush=True)
        return [None] * num_workers
    present = nvidia.driver_gpus() if visible is None else None
    num_present = None if present is None else len(present)
    return [*worker_environment.shares(num_workers, gpus_per_worker, visible, num_present)]


def print_tf_config(hosts: list[str], words: list[str]) -> None:
    """A line for each machine: its TF_CONFIG, and the command where one is given."""
    addresses = worker_environment.checked_hosts(hosts)
    for index, address in enumerate(addresses):
        text = worker_environment.tf_config(addresses, index)
        start = f"TF_CONFIG='{text}' {command.typed(words)}" if words else (
            f"export TF_CONFIG='{text}'"
        )
        print(f"{start}  # on {address.rpartition(':')[0]}{', the chief' if not index else ''}")


def main(argv: list[str] | None = None) -> int:
    """The exit code of the command line; None: the process' own."""
    define_flags()
    return command_line.exit_code(lambda: sys.exit(run(argv or sys.argv)))


if __name__ == "__main__":
    sys.exit(main())
