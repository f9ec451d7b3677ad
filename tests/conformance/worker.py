"""python -m tests.conformance.worker --num_towers=6 --out=DIR: one worker, on models of all kinds.

The environment's TF_CONFIG says which. Trains each model for a few steps, evaluates and predicts;
writes DIR/worker-INDEX.json: the digest of all bits of each.
"""

import hashlib
import json
from functools import partial
from pathlib import Path

from absl import app, flags

FLAGS = flags.FLAGS
flags.DEFINE_integer("num_towers", 2, "Of all workers together.")
flags.DEFINE_list("kinds", [], "Which.")
flags.DEFINE_string("out", None, "Directory of the results.")

SHAPE, CLASSES = (12, 12, 1), 10
BATCHES = [12, 12, 7, 3]  # a partial last batch, and one smaller than most tower counts


def main(argv):
    del argv
    import towers
    from towers.workers import workers

    cluster = workers.join_workers()
    towers.logical_cpus(8, num_towers=FLAGS.num_towers)
    digests = {name: run() for name, run in kinds(FLAGS.num_towers).items() if name in FLAGS.kinds}
    Path(FLAGS.out, f"worker-{cluster.index}.json").write_text(json.dumps(digests))
    workers.Workers(cluster).barrier()


def kinds(num_towers):
    """What each model's name stands for: () -> digest."""
    import keras

    from tests.conformance.cases import BUILDERS, ODD, noisy, rows
    from tests.step.assigned_test import keeps
    from towers.machine.devices import GPU

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
    import keras

    layers = keras.layers
    x = keras.Input(SHAPE)
    y = layers.BatchNormalization()(layers.Conv2D(4, 3, strides=2)(x))
    z = layers.Conv2D(4, 3, padding="same")(layers.Dropout(0.2)(layers.ReLU()(y)))
    y = layers.GlobalAveragePooling2D()(layers.Add()([y, layers.BatchNormalization()(z)]))
    return keras.Model(x, layers.Dense(CLASSES, activation="softmax")(y))


def image(num_examples, rng):
    x = rng.normal(size=(num_examples, *SHAPE)).astype("float32")
    return x, rng.integers(0, CLASSES, num_examples), None


def train(num_towers, build, batch, *, optimizer=None, poisoned=None, max_devices=8, **options):
    """The digest of all variables, logs and predictions, on at most so many devices a worker."""
    import keras
    import numpy as np
    import tensorflow as tf

    import towers
    from towers.workers import workers

    cluster = workers.join_workers()
    keras.utils.set_random_seed(3)
    model = build()
    rng = np.random.default_rng(0)
    batches = [batch(n, rng) for n in BATCHES]
    if poisoned is not None:
        batches[poisoned][0][0] = np.nan
    each = -(-num_towers // cluster.num_workers)
    step = towers.TowerStep(
        model, optimizer or keras.optimizers.Adam(0.01), num_towers=num_towers,
        devices=towers.tower_devices(min(max_devices, each), "cpu"), **options,
    )
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


if __name__ == "__main__":
    flags.mark_flag_as_required("out")
    app.run(main)
