"""Synchronous data-parallel training on one machine's GPUs: the public names, nothing else.

The names are imported when they are first used, so that `import towers`, and with it a mistyped
flag, does not wait for TensorFlow to start.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towers import datasets
    from towers import models
    from towers.config import TrainConfig
    from towers.devices import logical_cpus
    from towers.devices import tower_devices
    from towers.loop import train
    from towers.parallel_model import make_parallel
    from towers.step import TowerStep

__version__ = "0.1.0"

_MODULES = {
    "TowerStep": "towers.step",
    "TrainConfig": "towers.config",
    "datasets": "towers.datasets",
    "logical_cpus": "towers.devices",
    "make_parallel": "towers.parallel_model",
    "models": "towers.models",
    "tower_devices": "towers.devices",
    "train": "towers.loop",
}
_WITHOUT_TENSORFLOW = ("TrainConfig",)

__all__ = [
    "TowerStep",
    "TrainConfig",
    "datasets",
    "logical_cpus",
    "make_parallel",
    "models",
    "tower_devices",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _WITHOUT_TENSORFLOW:
        from towers import environment

        environment.check()
    module = importlib.import_module(_MODULES[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
