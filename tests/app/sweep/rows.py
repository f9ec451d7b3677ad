"""Rows of sweeps that did not run."""

from towers.app.sweep.table import Row, with_speedups


def row(batch_size, num_gpus, speed, model="cnn"):
    """A row of that examples_per_second; None for a cell that failed."""
    cell = Row(model, batch_size, batch_size // num_gpus, num_gpus, num_gpus)
    if speed is None:
        return cell._replace(error="it broke.")
    return cell._replace(examples_per_second=float(speed), val_accuracy=0.5)


def of_speeds(speeds):
    """Rows with speed-ups, from {(global batch, GPUs): examples per second}."""
    return with_speedups([row(*cell, speed) for cell, speed in speeds.items()])
