"""Resume: the callback that lets `make_parallel(...).fit` continue in a new process."""

from typing import Any, TypeVar

import keras

from towers.resume.directories import is_remote
from towers.machine import places
from towers.resume.train_state import Logs

_Callback = TypeVar("_Callback", bound=keras.callbacks.Callback)


class FitOption(keras.callbacks.Callback):
    """Marks a callback that only sets an option: a parallel model's `fit` looks for it."""

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Raises ValueError, because only a parallel model's `fit` obeys the callback."""
        raise only_parallel(self)


class Resume(FitOption):
    """Lets a fit continue where it was killed, when its script runs again.

    ```python
    parallel.fit(x, y, epochs=90, callbacks=[towers.Resume("backup", every=500)])
    ```

    A parallel model's `fit` finds this callback. It saves everything that the next steps depend on,
    and begins at the newest checkpoint. The result is bit-identical to a fit that was never
    interrupted. Each `fit` needs its own directory.
    """

    def __init__(self, directory: Any, every: int | None = None) -> None:
        """
        Args:
            directory: the directory of the checkpoints, which is made if it is missing, or a URL of
                fsspec, such as s3://bucket/path.
            every: the number of updates between two checkpoints. None saves at least every 10
                minutes. The end of each epoch is always saved.

        Raises:
            ValueError: an argument is wrong.
        """
        super().__init__()
        if every is not None and (type(every) is not int or every < 1):
            raise ValueError(f"every ({every!r}) must be an integer of at least 1, or None.")
        try:
            self.directory = directory if is_remote(directory) else places.absolute(directory)
        except TypeError:
            raise ValueError(f"directory ({directory!r}) must be a path.") from None
        self.every = every


def only_parallel(callback: keras.callbacks.Callback) -> ValueError:
    """Returns the error for a callback of towers in the fit of a model that is not parallel."""
    name = f"towers.{type(callback).__name__}"
    return ValueError(
        f"{name} works only in the fit of a parallel model. Make one with parallel = "
        "towers.make_parallel(model, gpus), compile it, and call parallel.fit(..., "
        f"callbacks=[{name}(...)])."
    )


def only_one(kind: type[_Callback], callbacks: object) -> _Callback | None:
    """Returns the callback of class `kind` in `fit`'s `callbacks`; ValueError if there are two."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return None  # Keras' fit runs this list as it is, and our callback raises
    found = [c for c in keras.tree.flatten(callbacks or []) if isinstance(c, kind)]
    if len(found) > 1:
        raise ValueError(f"callbacks: only one of them can be a towers.{kind.__name__}.")
    if found:
        return found[0]
    return None
