"""NoiseScale: the callback that adds the gradient noise scale to the logs of a parallel fit."""

from typing import Any

from towers.parallel.model_state import STATE
from towers.resume.resume import FitOption


class NoiseScale(FitOption):
    """Estimates whether a larger batch would help: adds "noise_scale" to the logs of each epoch.

    ```python
    parallel = towers.make_parallel(model, 8)
    history = parallel.fit(x, y, batch_size=256, callbacks=[towers.NoiseScale()])
    history.history["noise_scale"]  # such as [310.4, 1920.7, 5034.1], in examples
    ```

    The noise scale is the batch size at which half of the examples are wasted. With B examples in a
    batch, a share of 1 / (1 + B / noise_scale) of them helps. It usually grows while a model
    learns. Source: McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv
    1812.06162, 2018.

    Towers compute it from the gradients that they have, averaged over the first 10 steps of an
    epoch and every 20th step after them. The weights keep their bits. It is infinite if an epoch
    has too few steps to tell the gradient from its noise.

    Raises:
        ValueError: in `fit`, the model is not parallel, has one tower, has a custom `train_step`,
            or has a loss that needs the rows of all towers.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        """Raises ValueError if no parallel model's `fit` computes the noise scale."""
        towers = vars(self.model).get(STATE)
        if towers is None or not towers.noise_scale:
            super().on_train_begin(logs)
