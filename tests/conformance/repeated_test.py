"""The same gradient again and again has the same bits, whoever of TensorFlow's threads is first.

`python -m tests.conformance.repeated_test CASE ...`: several threads compute each gradient again
and again, and so do TensorFlow's own, which are more than the cores: what depends on who is first
comes out differently. Prints {case: distinct results}.
"""

import hashlib
import json
import sys
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.bits import bits
from tests.conformance.cases import BUILT_IN, Case, ODD, fan_out, rows
from tests.conformance.steps import mean_square, step_of
from tests.processes import ROOT

REPEATS = {"wide_fan_out": 200, "own_step": 200}  # each takes a millisecond; else 30
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
    wide = Case("wide_fan_out", lambda: fan_out(SIZE), rows)
    case = {c.name: c for c in [*BUILT_IN, *ODD, wide]}[name]
    keras.utils.set_random_seed(3)
    step = towers.TowerStep(case.build(), "sgd", **case.compile, devices=["/cpu:0"], num_towers=1)
    batch = case.batch(SIZE, np.random.default_rng(0))
    return lambda _: digest(tf.nest.flatten(step.gradients(*batch), expand_composites=True))


def own_step():
    """_ -> the digest of a model's weights after one `train_step` of its own, always the first."""
    cls = type("Own", (keras.Model,), {"train_step": step_of(mean_square)})
    keras.utils.set_random_seed(3)
    plain = fan_out(SIZE)
    model = towers.make_parallel(cls(plain.inputs, plain.outputs), 1)
    model.compile("sgd")
    x, y = (v.astype("float32") for v in rows(SIZE, np.random.default_rng(0))[:2])
    weights = model.get_weights()

    def compute(_):
        model.set_weights(weights)
        model.train_on_batch(x, y)
        return digest(model.weights)

    return compute


def digest(values):
    found = hashlib.sha256()
    for value in values:
        found.update(bits(value))
    return found.hexdigest()


TELLING = ["wide_fan_out", "own_step", "embedding"]
REST = [case.name for case in [*BUILT_IN, *ODD] if case.name not in TELLING]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(TELLING, id="telling"),
        pytest.param(REST, id="rest", marks=pytest.mark.matrix),
    ],
)
def test_a_gradient_has_the_same_bits_every_time(names):
    done = processes.run("-m", "tests.conformance.repeated_test", *names, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict.fromkeys(names, 1)


if __name__ == "__main__":
    main(sys.argv[1:])
