"""A run is defined by its number of towers; workers only decide which process computes a tower.

Real processes, which meet over gRPC: `python -m tests.conformance.workers_test DIR TOWERS KIND ...`
is one of them; the environment's TF_CONFIG says which. It trains each kind of model for a few
steps, evaluates and predicts; writes DIR/worker-INDEX.json: the digest of all bits of each.
"""

import functools
import hashlib
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.conformance.cases import BUILDERS, ODD, noisy, rows
from tests.processes import run_all
from tests.step.assigned_test import keeps
from towers.machine.devices import GPU
from towers.workers import workers

L = keras.layers
SHAPE, CLASSES = (12, 12, 1), 10
BATCHES = [12, 12, 7, 3]  # a partial last batch, and one smaller than most tower counts


def main(out, num_towers, *names):
    cluster = workers.join_workers()
    towers.logical_cpus(8, num_towers=int(num_towers))
    found = {name: run() for name, run in kinds(int(num_towers)).items() if name in names}
    Path(out, f"worker-{cluster.index}.json").write_text(json.dumps(found))
    workers.Workers(cluster).barrier()


def kinds(num_towers):
    """What each model's name stands for: () -> digest."""
    labels = "sparse_categorical_crossentropy"
    images = partial(train, num_towers, loss=labels, metrics=["accuracy"])
    found = {}
    for name in ("cnn", "gru", "resnet20"):  # dropout; recurrence; BatchNormalization, averaged
        found[name] = partial(images, lambda name=name: BUILDERS[name](SHAPE, CLASSES), image)
    found["synchronized"] = partial(found["resnet20"], batch_norm="synchronized")
    found["tower0"] = partial(found["resnet20"], batch_norm="tower0")
    found["skip"] = partial(found["cnn"], nonfinite="skip", poisoned=1)
    found["as_gpus"] = partial(found["cnn"], policy=GPU)
    found["mirrored"] = partial(found["resnet20"], strategy="mirrored", policy=GPU)
    found["stages"] = partial(found["resnet20"], gpus_per_tower=2, policy=GPU)
    schedule = keras.optimizers.schedules.CosineDecay(0.01, 10)
    found["schedule"] = partial(found["cnn"], optimizer=keras.optimizers.Adam(schedule))
    found["keeps"] = partial(train, num_towers, keeps, rows, loss="mse")
    for name in ("synchronized", "mirrored", "stages"):
        options = found[name].keywords
        found[f"small_{name}"] = partial(train, num_towers, small, image, max_devices=2, **options)
    found["noise"] = partial(train, num_towers, partial(noisy, "mapped"), rows, loss="mse")
    for case in ODD:
        if case.name != "ignore_class":  # its weights depend on the labels: not exact by design
            found[case.name] = partial(train, num_towers, case.build, case.batch, **case.compile)
    return found


def small():
    """A residual block with statistics and dropout: what is compiled in seconds."""
    x = keras.Input(SHAPE)
    y = L.BatchNormalization()(L.Conv2D(4, 3, strides=2)(x))
    z = L.Conv2D(4, 3, padding="same")(L.Dropout(0.2)(L.ReLU()(y)))
    y = L.GlobalAveragePooling2D()(L.Add()([y, L.BatchNormalization()(z)]))
    return keras.Model(x, L.Dense(CLASSES, activation="softmax")(y))


def image(num_examples, rng):
    x = rng.normal(size=(num_examples, *SHAPE)).astype("float32")
    return x, rng.integers(0, CLASSES, num_examples), None


def train(num_towers, build, batch, *, optimizer=None, poisoned=None, max_devices=8, **options):
    """The digest of all variables, logs and predictions, on at most so many devices a worker."""
    cluster = workers.join_workers()
    keras.utils.set_random_seed(3)
    model = build()
    rng = np.random.default_rng(0)
    batches = [batch(n, rng) for n in BATCHES]
    if poisoned is not None:
        batches[poisoned][0][0] = np.nan
    each = -(-num_towers // cluster.num_workers)
    step = towers.TowerStep(model, optimizer or keras.optimizers.Adam(0.01), num_towers=num_towers,
                            devices=towers.tower_devices(min(max_devices, each), "cpu"), **options)
    digest = hashlib.sha256()
    for values in batches:
        digest.update(repr({k: float(v) for k, v in step(*values).items()}).encode())
    step.reset_metrics()
    for values in batches:
        logs = step.test_batch(*values)
    digest.update(repr({k: float(v) for k, v in logs.items()}).encode())
    for values in batches:
        predicted = tf.nest.flatten(step.predict_batch(values[0]), expand_composites=True)
        digest.update(b"".join(value.numpy().tobytes() for value in predicted))
    for variable in [*model.variables, *step.optimizer.variables, *step.unlisted_variables]:
        digest.update(variable.numpy().tobytes())
    return digest.hexdigest()


QUICK = ("cnn", "synchronized", "skip", "masked_gru", "two_outputs", "noise", "keeps")
REST = ("resnet20", "embedding", "sample_weight", "adds_loss", "gru", "tower0", "as_gpus",
        "schedule", "ragged_output")
FAR = ("synchronized", "mirrored", "stages")  # statistics, parameters, activations travel, too
SMALL = tuple(f"small_{name}" for name in FAR)
SUMS = ("layer_norm", "sum", "subclassed", "embedding")


def digests(num_workers, num_towers, kinds):
    """{kind: digest} of each worker."""
    with tempfile.TemporaryDirectory() as out:
        ended = run_all(num_workers, "-m", __name__, out, num_towers, *kinds, timeout=3000)
        assert [code for code, _, _ in ended] == [0] * num_workers, ended[0][2]
        return [json.loads(Path(out, f"worker-{w}.json").read_text()) for w in range(num_workers)]


@functools.cache
def alone(num_towers, kinds):
    """{kind: digest} of one process."""
    return digests(1, num_towers, kinds)[0]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_towers, worker_counts, kinds", [
    (6, [3], SMALL),  # worker 1 has two towers of two subtrees
    pytest.param(6, [3], FAR, marks=pytest.mark.matrix),
    pytest.param(6, [3], ("embedding", "sparse", "ragged"), marks=pytest.mark.matrix),
    pytest.param(4, [2], QUICK, marks=pytest.mark.matrix),
    pytest.param(4, [4], QUICK + REST, marks=pytest.mark.matrix),
    pytest.param(5, [2, 3, 4], SUMS, marks=pytest.mark.matrix),
    pytest.param(8, [3], ("embedding", "two_outputs_dict"), marks=pytest.mark.matrix),
])
def test_any_number_of_workers_gives_the_bits_of_one_process(num_towers, worker_counts, kinds):
    assert set(alone(num_towers, kinds)) == set(kinds)
    for num_workers in worker_counts:
        for worker in digests(num_workers, num_towers, kinds):
            assert worker == alone(num_towers, kinds)


@pytest.mark.matrix
def test_the_tower_count_does_change_the_bits():
    """Otherwise the test above could not fail."""
    assert alone(4, QUICK)["synchronized"] != alone(6, FAR)["synchronized"]


if __name__ == "__main__":
    main(*sys.argv[1:])
