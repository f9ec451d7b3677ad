"""Seconds of the first two epochs of `make_parallel(model, 3).fit` and of Keras' `fit`, in rounds.

    python benchmarks/first_epochs.py --models=MobileNetV2,ResNet50V2 --rounds=3

Each run is a separate process. It prints the digest of the weights, so that two versions of towers
can be compared bit for bit.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from absl import app, flags

_MODELS = flags.DEFINE_list("models", ["MobileNetV2"], "Names in keras.applications.")
_ROUNDS = flags.DEFINE_integer("rounds", 3, "Runs of each model, in turn with fit.", lower_bound=1)
_BATCH_NORM = flags.DEFINE_string("batch_norm", "synchronized", "As in make_parallel.")
_CASE = flags.DEFINE_enum("case", None, ["fit", "towers"], "Run one model in this process.")


def run_case(name: str, with_towers: bool) -> None:
    """Trains one model for two epochs of batches of 12 and 8 images; prints seconds and digest."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import keras

    import towers

    towers.logical_cpus(3)
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 32, 32, 3)), rng.integers(0, 10, 20)
    make = getattr(keras.applications, name)
    model = make(weights=None, input_shape=(32, 32, 3), classes=10)
    run = towers.make_parallel(model, 3, batch_norm=_BATCH_NORM.value) if with_towers else model
    run.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    begin = time.perf_counter()
    run.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
    print(f"{time.perf_counter() - begin:.2f} {towers.digest(model)}")


def main(argv: list[str]) -> None:
    """Measures every model in turn with `fit`, and prints the medians and their ratio."""
    del argv
    if _CASE.value:
        run_case(_MODELS.value[0], _CASE.value == "towers")
        return
    for name in _MODELS.value:
        seconds: dict[str, list[float]] = {"fit": [], "towers": []}
        for _ in range(_ROUNDS.value):
            for case, found in seconds.items():
                options = [f"--case={case}", f"--models={name}"]
                done = subprocess.run(
                    [sys.executable, __file__, *options, f"--batch_norm={_BATCH_NORM.value}"],
                    check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                )
                print(name, case, line := done.stdout.splitlines()[-1], flush=True)
                found.append(float(line.split()[0]))
        fit, ours = (statistics.median(found) for found in seconds.values())
        print(f"{name}: fit {fit:.1f} s, towers {ours:.1f} s, ratio {ours / fit:.2f}")


if __name__ == "__main__":
    app.run(main)
