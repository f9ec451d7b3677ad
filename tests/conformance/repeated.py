"""python -m tests.conformance.repeated CASE ...: whether each case's gradient is always the same.

Several threads compute each gradient again and again, and so do TensorFlow's own, which are more
than the cores: what depends on who is first comes out differently. Prints {case: distinct results}.
"""

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

REPEATS = {"wide_fan_out": 400, "own_step": 400}  # each takes a millisecond; else 30
NUM_THREADS = 8
SIZE = 128


def main(names):
    tf.config.threading.set_inter_op_parallelism_threads(NUM_THREADS)
    tf.config.threading.set_intra_op_parallelism_threads(NUM_THREADS)
    found = {}
    for name in names:
        compute = own_step() if name == "own_step" else gradients_of(name)
        compute(0)  # traced once
        with ThreadPoolExecutor(1 if name == "own_step" else 3) as threads:
            found[name] = len(set(threads.map(compute, range(REPEATS.get(name, 30)))))
    print(json.dumps(found))


def gradients_of(name):
    """_ -> the digest of a case's loss and gradients on one batch, on one tower."""
    import keras
    import numpy as np

    import towers
    from tests.conformance import cases

    wide = cases.Case("wide_fan_out", lambda: cases.fan_out(SIZE), cases.rows)
    case = {c.name: c for c in [*cases.BUILT_IN, *cases.ODD, wide]}[name]
    keras.utils.set_random_seed(3)
    step = towers.TowerStep(case.build(), "sgd", **case.compile, devices=["/cpu:0"], num_towers=1)
    batch = case.batch(SIZE, np.random.default_rng(0))
    return lambda _: digest(tf.nest.flatten(step.gradients(*batch), expand_composites=True))


def own_step():
    """_ -> the digest of a model's weights after one `train_step` of its own, always the first."""
    import keras
    import numpy as np

    import towers
    from tests.conformance import cases
    from tests.custom_step.steps import step_of

    def mean_square(model, x, y):
        return tf.reduce_mean((model(x) - y) ** 2)

    cls = type("Own", (keras.Model,), {"train_step": step_of(mean_square)})
    keras.utils.set_random_seed(3)
    plain = cases.fan_out(SIZE)
    model = towers.make_parallel(cls(plain.inputs, plain.outputs), 1)
    model.compile("sgd")
    x, y = (v.astype("float32") for v in cases.rows(SIZE, np.random.default_rng(0))[:2])
    weights = model.get_weights()

    def compute(_):
        model.set_weights(weights)
        model.train_on_batch(x, y)
        return digest(model.weights)

    return compute


def digest(values):
    found = hashlib.sha256()
    for value in values:
        found.update(value.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
