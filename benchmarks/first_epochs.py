"""Times the first two epochs of `make_parallel(model, 3).fit` and of Keras' `fit`, in rounds.

    python benchmarks/first_epochs.py --models=MobileNetV2,ResNet50V2 --rounds=3

It also prints the digest of the trained weights, which shows whether two versions of towers compute
bit-identical weights.
"""

import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.machine import peak_memory_mb

DEVICES = 3

_MODELS = flags.DEFINE_list("models", ["MobileNetV2"], "Names in keras.applications.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each model and side.", lower_bound=1)
_BATCH_NORM = flags.DEFINE_string("batch_norm", "synchronized", "Argument of make_parallel.")
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def train(model: str, batch_norm: str | None) -> dict[str, Any]:
    """Trains for two epochs of a batch of 12 and a batch of 8 images; call it in a fresh process.

    Args:
        model: a name in keras.applications.
        batch_norm: argument of make_parallel; None for Keras' own `fit`.
    """
    import keras
    import numpy as np

    import towers
    from benchmarks.contender import device_name

    towers.logical_cpus(DEVICES)
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 32, 32, 3)), rng.integers(0, 10, 20)
    build = getattr(keras.applications, model)
    trained = build(weights=None, input_shape=(32, 32, 3), classes=10)
    if batch_norm is not None:
        trained = towers.make_parallel(trained, DEVICES, batch_norm=batch_norm)
    trained.compile(
        "sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False
    )
    start = time.perf_counter()
    trained.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    return {
        "seconds": time.perf_counter() - start,
        "digest": towers.digest(trained),
        "peak_memory_mb": peak_memory_mb(),
        "device": device_name(),
    }


def main(argv: list[str]) -> None:
    """Measures each model and prints the medians and their ratio."""
    del argv
    for model in _MODELS.value:
        contenders: dict[str, dict[str, Any]] = {
            _BATCH_NORM.value: {"model": model, "batch_norm": _BATCH_NORM.value},
            "fit": {"model": model, "batch_norm": None},
        }
        results = rounds.run_rounds("first_epochs.train", contenders, _ROUNDS.value)
        rows = rounds.compare(
            results, _BATCH_NORM.value, "seconds", workload=model, num_devices=DEVICES
        )
        rounds.append_csv(_OUT.value, rows)
        print(rounds.table(rows))


if __name__ == "__main__":
    app.run(main)
