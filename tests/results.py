"""Rows of results.csv for tests: a classifier's."""

from towers.resume.run_dir import Result

COLUMNS = ["loss", "accuracy", "val_loss", "val_accuracy"]


def classifier_result(
    epoch, loss=0.5, accuracy=0.5, val_loss=0.5, val_accuracy=0.5, seconds=1.0,
    examples_per_second=1.0,
):
    """An epoch with these values."""
    values = dict(zip(COLUMNS, (loss, accuracy, val_loss, val_accuracy), strict=True))
    return Result(epoch, values, seconds, examples_per_second, "1a2b3c4d")
