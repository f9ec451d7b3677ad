"""python -m tests.fit_worker WHAT OUT: make_parallel and Keras' fit, in one worker of several."""

import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import towers


def make(seed=1):
    """A model made before make_parallel is called: TensorFlow has started then."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential([
        keras.Input((6,)), keras.layers.Dense(8, activation="relu"),
        keras.layers.BatchNormalization(), keras.layers.Dropout(0.3), keras.layers.Dense(3),
    ])


def data(count=50):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype("float32")
    return x, (x @ rng.normal(size=(6, 3))).astype("float32")


def fit(out):
    """The digest of what training, validation, evaluation and prediction give."""
    model = make()
    parallel = towers.make_parallel(model, 1, num_towers=4)
    parallel.compile("adam", "mse", metrics=["mae"])
    x, y = data()
    history = parallel.fit(
        x, y, batch_size=16, epochs=2, verbose=0, validation_data=data(7),
        sample_weight=np.linspace(0.5, 2, 50),
    )
    digest = hashlib.sha256(repr(history.history).encode())
    digest.update(repr(parallel.evaluate(x, y, batch_size=9, verbose=0)).encode())
    digest.update(parallel.predict(x, batch_size=9, verbose=0).tobytes())
    for variable in [*model.variables, *parallel.optimizer.variables]:
        digest.update(variable.numpy().tobytes())
    index = towers.join_workers().index
    Path(out, f"{index}.json").write_text(json.dumps(digest.hexdigest()))


class Killed(keras.callbacks.Callback):
    """Kills its worker after some steps; the first time."""

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.optimizer.iterations) == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def resumed(out, *killed):
    """The digest of a fit that goes on from its checkpoints, of the chief's disk alone."""
    index = towers.join_workers().index
    model = make()
    random.seed(index)  # the order of the examples is the chief's
    parallel = towers.make_parallel(model, 1, num_towers=4)
    parallel.compile("adam", "mse", metrics=["mae"])
    own = Path(out, f"backup-{index}")
    callbacks = [towers.Resume(own, every=2), *(Killed() for _ in killed)]
    history = parallel.fit(*data(), batch_size=8, epochs=2, verbose=0, callbacks=callbacks)
    digest = hashlib.sha256(repr(history.history).encode())
    for variable in [*model.variables, *parallel.optimizer.variables]:
        digest.update(variable.numpy().tobytes())
    Path(out, f"{index}.json").write_text(json.dumps(digest.hexdigest()))


def other_shuffle(out):
    parallel = towers.make_parallel(make(), 1)
    parallel.compile("adam", "mse")
    keras.utils.set_random_seed(towers.join_workers().index)
    np.random.seed(towers.join_workers().index)
    parallel.fit(*data(), batch_size=16, verbose=0)


def late(out):
    """A script that does not join the workers before its model starts TensorFlow."""
    towers.make_parallel(make(), 1)


def other_model(out):
    parallel = towers.make_parallel(make(seed=towers.join_workers().index), 1)
    parallel.compile("adam", "mse")
    parallel.fit(*data(), batch_size=16, verbose=0)


class Own(keras.Sequential):
    def train_step(self, data):
        return super().train_step(data)


def own_step(out):
    parallel = towers.make_parallel(Own(make().layers), 1)
    parallel.compile("adam", "mse")
    parallel.fit(*data(), batch_size=16, verbose=0)


if __name__ == "__main__":
    if sys.argv[1] != "late":
        towers.join_workers()
    known = {f.__name__: f for f in (fit, late, resumed, other_shuffle, other_model, own_step)}
    known[sys.argv[1]](*sys.argv[2:])
