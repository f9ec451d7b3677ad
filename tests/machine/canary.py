"""A canary: a use of one part of the libraries' insides, on the smallest thing that has it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def canary(library: str, part: str, what: str) -> Iterator[None]:
    """Within, whatever goes wrong is put down to the library, and names the part to mend.

    Args:
        library: with its version, such as "Keras 3.15".
        part: the module and the function or constant, such as "keras_internals.py, all_layers".
        what: the library did: it "no longer ...".
    """
    try:
        yield
    except Exception as error:
        pytest.fail(f"{library} no longer {what}: see towers/machine/{part} ({error!r})")
