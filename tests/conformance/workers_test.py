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
from tests.bits import bits
from tests.conformance.cases import BUILDERS, ODD, noisy, rows
from tests.conformance.custom_step_cases import OWN, VAE, OwnCase
from tests.conformance.gans import update
from tests.processes import run_all
from tests.conformance.assigned_test import keeps
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
    cluster.barrier()


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
    found["small_sharded"] = partial(
        images,
        wide,
        image,
        max_devices=2,
        strategy="sharded",
        policy=GPU,
        batch_norm="synchronized",
    )
    found["small_gru"] = partial(images, recurrent, image)
    found["small_own_rows"] = partial(images, small, weighted, max_devices=2, own_rows=True)
    found["noise"] = partial(train, num_towers, partial(noisy, "mapped"), rows, loss="mse")
    for name, make, data in [*OWN, OwnCase("everything", Everything, tokens)]:
        found[f"own_{name}"] = partial(fit, num_towers, make, data)
    found["own_tower0"] = partial(found["own_everything"], batch_norm="tower0")
    found["own_loss"] = partial(fit, num_towers, masked, rows)
    for case in ODD:
        if case.name != "ignore_class":  # its weights depend on the labels: not exact by design
            found[case.name] = partial(train, num_towers, case.build, case.batch, **case.compile)
    return found


def small():
    """A residual block with statistics, dropout and rows in blocks; it is compiled in seconds."""
    x = keras.Input(SHAPE)
    y = L.BatchNormalization()(L.Conv2D(4, 3, strides=2)(x))
    z = L.Conv2D(4, 3, padding="same", dilation_rate=2)(L.Dropout(0.2)(L.ReLU()(y)))
    y = L.GlobalAveragePooling2D()(L.Add()([y, L.BatchNormalization()(z)]))
    return keras.Model(x, L.Dense(CLASSES, activation="softmax")(y))


def recurrent():
    """A loop that XLA compiles, also on CPUs."""
    layers = [L.Reshape((4, -1)), L.GRU(3), L.Dense(CLASSES, activation="softmax")]
    return keras.Sequential([keras.Input(SHAPE), *layers])


def wide():
    """The first kernel has rows that are long enough to be cut into slices."""
    return keras.Sequential(
        [
            keras.Input(SHAPE),
            L.Flatten(),
            L.Dense(67, activation="tanh"),
            L.BatchNormalization(),
            L.Dropout(0.2),
            L.Dense(CLASSES, activation="softmax"),
        ]
    )


def image(num_examples, rng):
    x = rng.normal(size=(num_examples, *SHAPE)).astype("float32")
    return x, rng.integers(0, CLASSES, num_examples), None


def weighted(num_examples, rng):
    return *image(num_examples, rng)[:2], rng.uniform(0.5, 2, num_examples)


def train(num_towers, build, batch, *, optimizer=None, poisoned=None, max_devices=8, **options):
    """The digest of all variables, logs and predictions, on at most so many devices a worker.

    One process keeps one set of parameters instead of slices, and each example.
    """
    cluster = workers.join_workers()
    if cluster.num_workers == 1 and options.get("strategy") == "sharded":
        options["strategy"] = "parameter_server"
    keras.utils.set_random_seed(3)
    model = build()
    rng = np.random.default_rng(0)
    batches = [batch(n, rng) for n in BATCHES]
    if poisoned is not None:
        batches[poisoned][0][0] = np.nan
    each = -(-num_towers // cluster.num_workers)
    step = towers.TowerStep(
        model,
        optimizer or keras.optimizers.Adam(0.01),
        num_towers=num_towers,
        devices=towers.tower_devices(min(max_devices, each), "cpu"),
        **options,
    )
    if step.own_rows is not None:  # NaN would spread from each row that is not this worker's
        for x, y, sample_weight in batches:
            others = ~step.own_rows(len(x)).numpy()
            x[others], y[others], sample_weight[others] = np.nan, CLASSES, np.nan
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
        digest.update(bits(variable))
    return digest.hexdigest()


def fit(num_towers, make, data, batch_norm="synchronized"):
    """The digest of all variables, logs and predictions of a fit whose towers meet within a step.

    22 rows in batches of 16, or of 4 if that leaves towers without a row.
    """
    keras.utils.set_random_seed(3)
    each = -(-num_towers // workers.join_workers().num_workers)
    model = towers.make_parallel(make(), min(each, 2), num_towers=num_towers, batch_norm=batch_norm)
    options = {"batch_size": 16 if num_towers < 6 else 4, "verbose": 0}
    values = data(22, np.random.default_rng(22))
    found = [model.fit(*values[:2], epochs=2, shuffle=False, **options).history]
    if isinstance(model, (keras.Sequential, VAE, Everything)):
        found.append(model.evaluate(*values[:2], **options))
        predicted = model.predict(values if isinstance(model, VAE) else values[0], **options)
        found.append([value.tobytes() for value in keras.tree.flatten(predicted)])
    digest = hashlib.sha256(repr(found).encode())
    for variable in model.variables:
        digest.update(bits(variable))
    return digest.hexdigest()


class Everything(keras.Model):
    """Ragged rows that towers gather, seeds, statistics, lookups, a state, two optimizers."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = L.Embedding(9, 4), L.Embedding(5, 4)
        self.head = keras.Sequential(
            [
                keras.Input((4,)),
                L.BatchNormalization(),
                L.Dropout(0.3, seed=1),
                L.Dense(2),
            ]
        )
        self.largest = self.add_weight(shape=(2,), initializer="zeros", trainable=False)
        self.slow = keras.optimizers.Adam(0.1)
        self.compile("sgd", "mse", metrics=["mae"], jit_compile=False)

    def embedded(self, tokens):
        return tf.ragged.map_flat_values(self.embed, tokens)

    def call(self, tokens, training=False):
        places = self.places(tf.range(5))  # the same rows in every tower
        return self.head(tf.reduce_mean(self.embedded(tokens), 1) + places[1], training=training)

    def train_step(self, data):
        tokens, y = data
        with tf.GradientTape(persistent=True) as tape:
            y_pred = towers.gather(self(tokens, training=True))
            loss = tf.sqrt(tf.reduce_sum((y_pred - towers.gather(y)) ** 2))
            norm = tf.norm(towers.gather(self.embedded(tokens)).flat_values - 0.1)
            both = loss + norm
        update(self.optimizer, tape, loss, self.head.trainable_weights)
        update(self.slow, tape, both, [*self.embed.weights, *self.places.weights])
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(y_pred, 0)))
        return {"loss": loss, "norm": norm, **self.compute_metrics(tokens, y, self(tokens))}

    def test_step(self, data):
        tokens, y = data
        return self.compute_metrics(tokens, y, self(tokens))

    def predict_step(self, data):
        return self(data)


def tokens(num_examples, rng):
    lengths = rng.integers(1, 5, num_examples)
    values = rng.integers(0, 9, lengths.sum()).astype("int32")
    y = rng.normal(size=(num_examples, 2)).astype("float32")
    return tf.RaggedTensor.from_row_lengths(values, lengths), y


def masked():
    """A compiled loss that is neither a mean nor a sum, which the towers' rows are gathered for."""

    def loss(y, y_pred):
        mask = tf.cast(y > 0, y_pred.dtype)
        return tf.reduce_sum((y - y_pred) ** 2 * mask) / tf.reduce_sum(mask)

    model = keras.Sequential([keras.Input((6,)), L.Dense(5), L.BatchNormalization(), L.Dense(3)])
    model.compile("adam", loss, metrics=["mae"], jit_compile=False)
    return model


QUICK = ("cnn", "synchronized", "skip", "masked_gru", "two_outputs", "noise", "keeps")
REST = (
    "resnet20",
    "embedding",
    "sample_weight",
    "adds_loss",
    "gru",
    "tower0",
    "as_gpus",
    "schedule",
    "ragged_output",
)
FAR = ("synchronized", "mirrored", "stages")  # statistics, parameters, activations travel, too
SMALL = tuple(f"small_{name}" for name in (*FAR, "sharded", "own_rows", "gru"))
OWN_FEW = "own_gan", "own_everything", "own_loss"
OWN_ALL = (*OWN_FEW, "own_tower0", *(f"own_{case}" for case in OWN if case.name != "gan"))
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
@pytest.mark.parametrize(
    "num_towers, worker_counts, kinds",
    [
        # Worker 1 has towers 1 and 2, from both halves of the tree of sums.
        (3, [2], ("small_sharded", "own_gan")),
        pytest.param(6, [3], (*SMALL, "own_everything", "own_loss"), marks=pytest.mark.matrix),
        pytest.param(3, [2, 3], OWN_ALL, marks=pytest.mark.matrix),
        pytest.param(8, [2, 3], OWN_ALL, marks=pytest.mark.matrix),
        pytest.param(6, [3], ("embedding", "sparse", "ragged"), marks=pytest.mark.matrix),
        pytest.param(4, [2], QUICK, marks=pytest.mark.matrix),
        pytest.param(4, [4], QUICK + REST, marks=pytest.mark.matrix),
        pytest.param(5, [2, 3, 4], SUMS, marks=pytest.mark.matrix),
    ],
)
def test_any_number_of_workers_gives_the_bits_of_one_process(num_towers, worker_counts, kinds):
    assert set(alone(num_towers, kinds)) == set(kinds)
    for num_workers in worker_counts:
        for worker in digests(num_workers, num_towers, kinds):
            assert worker == alone(num_towers, kinds)


if __name__ == "__main__":
    main(*sys.argv[1:])
