"""Exports the public names of towers, for synchronous data-parallel training on GPUs.

The names are imported when they are first used, so that `import towers`, and the error for a
mistyped flag, do not wait for TensorFlow to start.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from towers import datasets, models
    from towers.app.config import TrainConfig
    from towers.app.run import train
    from towers.divide.tower_step import TowerStep
    from towers.machine.devices import tower_devices
    from towers.machine.logical import logical_cpus, logical_gpus
    from towers.workers.workers import join_workers
    from towers.parallel.fit_options import HangTimeout, NoiseScale
    from towers.parallel.ledger import Ledger
    from towers.parallel.model_steps import ran_once
    from towers.parallel.parallel_model import make_parallel
    from towers.resume.resume import Resume
    from towers.step.gathering import gather
    from towers.divide.prefetch import prefetched
    from towers.step.digests import digest

__version__ = "0.1.0"

_MODULES = {
    "HangTimeout": "towers.parallel.fit_options",
    "Ledger": "towers.parallel.ledger",
    "NoiseScale": "towers.parallel.fit_options",
    "Resume": "towers.resume.resume",
    "TowerStep": "towers.divide.tower_step",
    "TrainConfig": "towers.app.config",
    "datasets": "towers.datasets",
    "digest": "towers.step.digests",
    "gather": "towers.step.gathering",
    "join_workers": "towers.workers.workers",
    "logical_cpus": "towers.machine.logical",
    "logical_gpus": "towers.machine.logical",
    "make_parallel": "towers.parallel.parallel_model",
    "models": "towers.models",
    "prefetched": "towers.divide.prefetch",
    "ran_once": "towers.parallel.model_steps",
    "tower_devices": "towers.machine.devices",
    "train": "towers.app.run",
}
_WITHOUT_TENSORFLOW = ("TrainConfig",)

__all__ = [
    "HangTimeout",
    "Ledger",
    "NoiseScale",
    "Resume",
    "TowerStep",
    "TrainConfig",
    "datasets",
    "digest",
    "gather",
    "join_workers",
    "logical_cpus",
    "logical_gpus",
    "make_parallel",
    "models",
    "prefetched",
    "ran_once",
    "tower_devices",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from towers.machine.words import nearest

        remedy = nearest(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{remedy}")
    if name not in _WITHOUT_TENSORFLOW:
        from towers.machine import environment

        environment.check()
    module = importlib.import_module(_MODULES[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    # Without the modules that this file imports, and the folders that users' imports have added.
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
