"""Holds the `trainable` flags of a model as they were when its step was made."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from towers.machine.keras_internals import all_layers
from towers.machine.user_lines import warn_user


class TrainableFlags:
    """Remembers `trainable` of a model's layers and variables; warns of changes."""

    def __init__(self, model: keras.Model) -> None:
        # Variables come after layers, because setting a layer's flag changes its variables.
        self._owners = [*all_layers(model), *model.variables]
        self._made = self._last_seen = self._now()

    def _now(self) -> list[bool]:
        return [owner.trainable for owner in self._owners]  # 0.2 ms for ResNet50

    def warn_of_changes(self) -> None:
        """Warns once of each change."""
        now = self._now()
        if now != self._last_seen:
            self._last_seen = now
            warn_user(
                "`trainable` has changed since the step was made, without effect; make a new step, "
                "or compile a parallel model again.",
            )

    @contextmanager
    def as_made(self) -> Iterator[None]:
        """Inside the context, the model has the flags that it had when the step was made."""
        now = self._now()
        if now != self._made:
            self._set(self._made)
        try:
            yield
        finally:
            if now != self._made:
                self._set(now)

    def _set(self, flags: list[bool]) -> None:
        for owner, flag in zip(self._owners, flags, strict=True):
            owner.trainable = flag
