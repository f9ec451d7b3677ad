"""train.py, TowerStep and make_parallel(...).fit, as README shows them, are one and the same."""

import keras
import numpy as np
import pytest

from tests import processes
from tests.processes import ROOT
from tests.resuming import environment

# Dropout, BatchNormalization, Adam, ragged last batches; the threads of an operation change its
# bits: on 2 cores 4 towers get one thread each, and TensorFlow alone would take two.
TOWERS, DEVICES, BATCH, EPOCHS, SEED = 4, 2, 16, 2, 0

SETUP = f"""
import sys

import keras
import numpy as np
import tensorflow as tf

import towers

towers.logical_cpus({DEVICES}, num_towers={TOWERS})

from tests import resuming
from towers.app.datasets.batches import load_examples
from towers.resume.epoch import Epoch

train, _ = resuming.data()
examples = load_examples(train)
batches = [
    batch for epoch in range({EPOCHS})
    for batch in examples.batches(Epoch({BATCH}, {SEED}, epoch))
]
loss = "sparse_categorical_crossentropy"
keras.utils.set_random_seed({SEED})
with tf.device("/cpu:0"):
    model = resuming.model((6, 6, 1), 3)
tf.device("/cpu:1").__enter__()  # as GPU 0 is for what a script places nowhere, where there is one
optimizer = keras.optimizers.Adam()
"""
STEP = f"""
step = towers.TowerStep(model, optimizer, loss, metrics=["accuracy"], num_towers={TOWERS})
for x, y in batches:
    step(x, y)
"""
FIT = f"""
parallel = towers.make_parallel(model, gpus={DEVICES}, num_towers={TOWERS})
parallel.compile(optimizer, loss, metrics=["accuracy"])
signature = tuple(tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in batches[0])
data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
parallel.fit(data, shuffle=False, verbose=0)
"""
SAVE = """
np.savez(sys.argv[1], *[variable.numpy() for variable in model.weights])
"""


@pytest.fixture(scope="module", name="train_weights")
def _train_weights(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("train")
    done = processes.run(
        ROOT / "train.py",
        "--model=tests.resuming:model",
        "--dataset=tests.resuming:data",
        "--device=cpu",
        f"--num_gpus={DEVICES}",
        f"--num_towers={TOWERS}",
        f"--batch_size={BATCH}",
        f"--epochs={EPOCHS}",
        f"--seed={SEED}",
        "--run_dir=run",
        cwd=cwd,
        environment=environment(),
    )
    assert done.returncode == 0, done.stderr
    return [v.numpy() for v in keras.saving.load_model(cwd / "run" / "final.keras").weights]


@pytest.mark.telling("make_parallel")
@pytest.mark.parametrize("code", [STEP, FIT], ids=["TowerStep", "make_parallel"])
def test_a_script_of_readmes_lines_ends_in_the_bits_of_train_py(code, train_weights, tmp_path):
    path = tmp_path / "weights.npz"
    done = processes.run("-c", SETUP + code + SAVE, path, cwd=ROOT, environment=environment())
    assert done.returncode == 0, done.stderr
    with np.load(path) as saved:
        weights = [saved[name] for name in saved.files]
    assert [w.tobytes() for w in weights] == [w.tobytes() for w in train_weights]
