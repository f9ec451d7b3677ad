"""How examples are fed to a run, beside which ones: plain values, from its configuration."""

from typing import NamedTuple


class InputOptions(NamedTuple):
    """augment: see `augment.load`; of training examples alone.

    data_workers: processes that read a random-access source; 0: a thread.
    data_timeout: seconds that one of its examples may take.
    shuffle_buffer: examples among which a streamed tf.data.Dataset is shuffled.
    """

    augment: str | None = None
    data_workers: int = 0
    data_timeout: float = 300.0
    shuffle_buffer: int = 10_000
