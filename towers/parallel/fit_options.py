"""Callbacks that set options of `make_parallel(...).fit`: HangTimeout and NoiseScale."""

from collections.abc import Sequence

from towers.machine import hang
from towers.machine.devices import place_towers, placement
from towers.parallel.model_state import STATE
from towers.workers.workers import join_workers
from towers.resume.resume import FitOption
from towers.resume.train_state import Logs


class HangTimeout(FitOption):
    """Ends a fit that makes no progress, and prints where it hangs.

    ```python
    parallel.fit(x, y, callbacks=[towers.HangTimeout(600), towers.Resume("backup")])
    ```

    The process prints its phase and the stacks of its threads to stderr, and ends with exit code 4.
    Several workers watch each other and need no such callback.
    """

    def __init__(self, seconds: float | str = "auto") -> None:
        """
        Args:
            seconds: the longest time without progress after the first step, or 0 for no limit.
                "auto" means 10 times the longest step so far, and at least 5 minutes.

        Raises:
            ValueError: `seconds` is none of these.
        """
        super().__init__()
        if seconds != "auto" and (
            not isinstance(seconds, int | float)
            or isinstance(seconds, bool)
            or not 0 <= seconds <= hang.MOST_SECONDS
        ):
            raise ValueError(
                f"seconds ({seconds!r}) must be 'auto', or a number from 0 (never) to "
                f"{hang.MOST_SECONDS}, such as 300."
            )
        self.seconds = seconds

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raises ValueError if no parallel model's `fit` watches the time."""
        if not hang.now.watchers:
            super().on_train_begin(logs)

    def watch(self, devices: Sequence[str], num_towers: int) -> hang.Watch:
        """Returns a context manager that ends a hanging fit; several workers watch each other."""
        is_alone = join_workers().num_workers == 1
        return hang.Watch(
            placement(place_towers(num_towers, devices), 0) if is_alone else "all towers",
            "Start the script again: with towers.Resume among its callbacks it continues from its "
            "last checkpoint. If it was at work, give towers.HangTimeout more seconds.",
            0.0 if not is_alone else None if self.seconds == "auto" else float(self.seconds),
        )


class NoiseScale(FitOption):
    """Estimates whether a larger batch would help: adds "noise_scale" to the logs of each epoch.

    ```python
    parallel = towers.make_parallel(model, 8)
    history = parallel.fit(x, y, batch_size=256, callbacks=[towers.NoiseScale()])
    history.history["noise_scale"]  # such as [310.4, 1920.7, 5034.1], in examples
    ```

    From this batch size on, more examples hardly reduce the noise of a gradient. With B examples in
    a batch, a share of 1 / (1 + B / noise_scale) of them helps. It usually grows while a model
    learns. Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv
    1812.06162, 2018.

    Towers compute it from the gradients that they have, averaged over the first 10 steps of an
    epoch and every 20th step after them. The weights keep their bits. It is infinite if an epoch
    has too few steps to tell the gradient from its noise.

    Raises:
        ValueError: in `fit`, the model is not parallel, has one tower, has a custom `train_step`,
            or computes all gradients once, from the rows of all towers.
    """

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raises ValueError if no parallel model's `fit` computes the noise scale."""
        towers = vars(self.model).get(STATE)
        if towers is None or not towers.noise_scale:
            super().on_train_begin(logs)
