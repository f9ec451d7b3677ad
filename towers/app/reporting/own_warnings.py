"""Warnings of towers' own, as lines of the report; those of libraries stay where they are."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGE = str(Path(__file__).parents[2])


@contextmanager
def told(warn: Callable[[str], None]) -> Iterator[None]:
    """Within, what towers warn of is told, where a command would hold it back with all the rest.

    Args:
        warn: is given the text.
    """
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *rest: Any) -> None:
        if filename.startswith(_PACKAGE) and issubclass(category, UserWarning):
            warn(str(message))
        else:
            before(message, category, filename, *rest)

    warnings.showwarning = show  # type: ignore[assignment]  # the rest is handed on
    try:
        yield
    finally:
        warnings.showwarning = before
