"""make_parallel's fit on several real workers, by scripts that know nothing of them.

`python -m` and this module's name, a function's and a directory, is one of the workers.
"""

import hashlib
import os
import random
import signal
import sys
from pathlib import Path

import keras
import numpy as np

import towers
from tests.processes import run_all


def make(seed=1):
    """A model made before make_parallel is called: TensorFlow has started then."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="relu"),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(3),
        ]
    )


def compiled(model, num_towers=None):
    parallel = towers.make_parallel(model, 1, num_towers=num_towers)
    parallel.compile(keras.optimizers.SGD(0.01, momentum=0.9), "mse")
    return parallel


def data(count=50):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(count, 6)).astype("float32")
    return x, (x @ rng.normal(size=(6, 3))).astype("float32")


def fit(out, *killed):
    """Training, validation and prediction, with checkpoints on the chief's disk alone.

    killed: if given, one worker stops the fit after step 5, and the process kills itself in step 6;
        else it resumes the fit.
    """

    def kill(batch, logs):
        step = int(parallel.optimizer.iterations)
        if killed and step == 5 and index == 1:
            parallel.stop_training = True
        if killed and step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

    index = towers.join_workers().index
    parallel, (x, y) = compiled(make(), 3), data()
    random.seed(index)  # the order of the examples is the chief's
    callbacks = [
        towers.Resume(Path(out, f"backup-{index}"), every=2),
        keras.callbacks.LambdaCallback(on_train_batch_end=kill),
    ]
    for initial_epoch in (0, 1) if killed else (0,):
        history = parallel.fit(
            x,
            y,
            batch_size=16,
            epochs=2,
            initial_epoch=initial_epoch,
            verbose=0,
            callbacks=callbacks,
            validation_data=data(7),
            sample_weight=np.linspace(0.5, 2, 50),
        )
    predicted = parallel.predict(x, batch_size=9, verbose=0)
    digest = hashlib.sha256(repr(history.history).encode() + predicted.tobytes())
    for variable in [*parallel.weights, *parallel.optimizer.variables]:
        digest.update(variable.numpy().tobytes())
    Path(out, f"{index}.digest").write_text(digest.hexdigest())


def late(out):
    """A script that does not join the workers before its model starts TensorFlow."""
    compiled(make())


def mistakes(out):
    """Fits that are errors, one after the other; the last one ends the processes."""
    index = towers.join_workers().index
    path = Path(out, "all.weights.h5")
    checkpoint = keras.callbacks.ModelCheckpoint(path, save_weights_only=True)
    for seed, shuffle, callbacks in [(index, 0, []), (0, index, []), (0, 0, checkpoint)]:
        try:
            model = compiled(make(seed))
            keras.utils.set_random_seed(shuffle)
            model.fit(*data(), batch_size=16, verbose=0, callbacks=callbacks)
        except ValueError as error:
            print(error, file=sys.stderr)
    checkpoint.filepath = str(Path(out, f"{index}.weights.h5"))
    model.fit(*data(), batch_size=16, verbose=0, callbacks=[checkpoint])
    wrong_label(out)


def wrong_label(out):
    """The last example of the batch, in worker 1's shard, has a label that the loss refuses."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((3,)), keras.layers.Dense(3, activation="softmax")]
    parallel = towers.make_parallel(keras.Sequential(layers), 2)
    parallel.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    x, y = np.ones((8, 3), "float32"), np.array([0] * 7 + [9])
    parallel.fit(x, y, batch_size=8, shuffle=False, verbose=0)


def run(count, function, out, *more, timeout=300):
    """(exit code, stderr) of each of the workers."""
    out.mkdir(exist_ok=True)
    ended = run_all(count, "-m", __name__, function.__name__, out, *more, timeout=timeout)
    return [(code, errors) for code, _, errors in ended]


def test_a_fit_whose_workers_were_killed_resumes_to_the_bits_of_one_process(tmp_path):
    for count, killed in ((1, []), (2, ["killed"]), (2, [])):
        ended = run(count, fit, tmp_path / str(count), *killed)
        assert not killed or any(code == -signal.SIGKILL for code, _ in ended)
        for code, errors in ended:  # a worker may notice the other's end before its own
            is_lost = killed and "was lost in a train step" in errors
            assert is_lost or code == (-signal.SIGKILL if killed else 0), errors
    assert not list((tmp_path / "2/backup-1").glob("*"))  # the chief's alone
    digests = [path.read_text() for path in tmp_path.glob("*/*.digest")]
    assert len(digests) == 3 and len(set(digests)) == 1


def test_mistakes_of_one_worker_are_errors_of_all_and_a_towers_error_ends_its_worker(tmp_path):
    """All find other initial weights before the first step, and another order in that step."""
    ended = run(2, mistakes, tmp_path)
    for _, errors in ended:
        assert errors.count("differs from the chief in variable 0 kernel (") == 1
        assert "the workers have different global batches in a train step. Give " in errors
        assert "all.weights.h5') would write the same files in workers 0 and 1. Give it" in errors
    assert {path.name for path in tmp_path.glob("*.h5")} == {"0.weights.h5", "1.weights.h5"}
    (_, lost), (code, errors) = ended
    assert code == 1, errors
    assert "Received a label value of 9 which is outside the valid range of [0, 3)" in errors
    assert "rror: worker 1 (127.0.0.1:" in lost and "was lost in a train step" in lost


def test_workers_that_join_too_late_end_with_an_error(tmp_path):
    ended = run(2, late, tmp_path, timeout=120)
    message = (
        "2 workers, but TensorFlow has started before this process joined them: a model's "
        "variables start it, too. Call towers.join_workers()"
    )
    assert all(code == 1 and message in errors for code, errors in ended), ended


if __name__ == "__main__":
    if sys.argv[1] != "late":
        towers.join_workers()
    globals()[sys.argv[1]](*sys.argv[2:])
