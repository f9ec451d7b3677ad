"""Draws augmented.png: training examples, and what `--augment` makes of them in each epoch."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import keras
import numpy as np

from towers.app.datasets.augment import example_seed
from towers.app.datasets.batches import Examples
from towers.app.reporting import charts
from towers.app.training.build import Run
from towers.resume.epoch import Epoch

FILE = "augmented.png"
_EXAMPLES, _EPOCHS = 4, 7


def draw_augmented(run: Run, directory: Path, warn: Callable[[str], None]) -> None:
    """Draws augmented.png if x are images, unless it exists; if that fails, warns."""
    path = directory / FILE
    shape: Sequence[int | None] = getattr(run.train.specs[0], "shape", ())
    if path.exists() or len(shape) != 4 or shape[-1] not in (1, 3):
        return
    with charts.or_warning(FILE, warn):
        rows = list(versions(run.train, run.config.seed))
        height = 1.1 * len(rows) + 0.5
        with charts.figure_file(path, 8.0, height, f"--augment={run.config.augment}") as figure:
            grid = figure.subplots(len(rows), 1 + _EPOCHS, squeeze=False)
            for images, all_axes in zip(rows, grid, strict=True):
                low, high = images[0].min(), images[0].max()
                for image, axes in zip(images, all_axes, strict=True):
                    shown = (image.astype("float32") - low) / max(high - low, 1e-9)
                    axes.imshow(shown.clip(0, 1), cmap="gray", vmin=0, vmax=1)
                    axes.set_axis_off()
            for epoch, axes in enumerate(grid[0]):
                axes.set_title(f"epoch {epoch}" if epoch else "original", size="small")


def versions(examples: Examples, seed: int) -> Iterator[list[np.ndarray]]:
    """Yields, for the first examples, x [...] and what training gets in epochs 1, 2, ..."""
    assert examples.augment is not None
    batches = examples._replace(changes=()).batches(Epoch(_EXAMPLES))
    x, _, _ = keras.utils.unpack_x_y_sample_weight(next(iter(batches)))
    keys = [Epoch(1, seed=seed, number=number).key for number in range(_EPOCHS)]
    for index, image in enumerate(x):
        changed = [examples.augment(image, example_seed(key, index)) for key in keys]
        yield [version.numpy() for version in [image, *changed]]
