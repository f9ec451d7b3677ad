"""The machine that a sweep's cells ran on, in words."""

from typing import NamedTuple

from towers.machine.words import plural


class Machine(NamedTuple):
    """Where a cell ran.

    gpu: the GPU's name; None where towers ran on logical CPU devices.
    cores: the processor cores that the process may use.
    """

    gpu: str | None
    cores: int

    def __str__(self) -> str:
        cores = f"{self.cores} {plural('core', self.cores)}"
        return self.gpu or f"logical CPU devices on {cores}"

    def devices(self, count: int) -> str:
        """"2 GPUs", "1 device"."""
        return f"{count} {plural('GPU' if self.gpu else 'device', count)}"
