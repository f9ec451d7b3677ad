"""Every example runs to its end in a smaller size, learns, and is a command."""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest

from tests import forked

pytestmark = pytest.mark.tools
ROOT = Path(__file__).parents[1]
# Without a GPU, another default device stands for GPU 0, where a script makes all that it does not
# place.
RUN = """
import json, sys, keras, tensorflow as tf, towers
from examples import {name}
if not tf.config.list_physical_devices("GPU"):
    towers.logical_cpus(2)
    tf.device("/cpu:1").__enter__()
print(json.dumps({name}.main({arguments})))
"""
HAS_LOSSES = ["loss"]
HAS_ACCURACIES = ["accuracy", "loss", "val_accuracy", "val_loss"]

# The arguments of each example's main, and the names in its history.
SMALLER = {
    "wide_mlp": ("rows=600, inputs=100, widths=(50, 20), epochs=2", HAS_LOSSES),
    "melodies": ("examples=300, epochs=2, layer=keras.layers.LSTM, units=8", HAS_ACCURACIES),
    "two_inputs": ("pairs=1200, epochs=2", HAS_ACCURACIES),
    "transfer": ("examples=128, epochs=2, application=keras.applications.MobileNet",
                 HAS_ACCURACIES),
    "autoencoder": ("examples=1500, epochs=2", ["loss", "val_loss"]),
    "gan": ("examples=400, epochs=2, directory=sys.argv[1]",
            ["discriminator_loss", "generator_loss"]),
    "vae": ("examples=1500, epochs=2", ["divergence", "loss", "val_divergence", "val_loss"]),
    "distillation": ("examples=600, epochs=2", HAS_ACCURACIES),
    "contrastive": ("examples=800, epochs=2", HAS_LOSSES),
}
PRINTS = {
    "wide_mlp": "6,091 parameters, 600 rows,",  # 101 x 50 + 51 x 20 + 21
    "melodies": "; it was ",
    "vae": "codes of 1,500 images, standard",
    "distillation": "\nstudent: 0.",
    "contrastive": "linear probe: towers 0.",
}
PROOF = "what_others_get_wrong"  # trains, but not to learn
FALLS = {"gan": "discriminator_loss"}  # of the others: the loss


def python(*arguments):
    return forked.run(*arguments, cwd=ROOT)


def test_no_example_is_left_out():
    assert {*SMALLER, PROOF} == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.telling("autoencoder", "wide_mlp")
@pytest.mark.parametrize("name", SMALLER)
def test_an_example_trains_to_its_end_and_learns(name, tmp_path):
    arguments, names = SMALLER[name]
    run = python("-c", RUN.format(name=name, arguments=arguments), str(tmp_path))
    assert run.returncode == 0, run.stderr[-3000:]
    assert "its own rows" not in run.stderr  # no false alarm
    history = json.loads(run.stdout.splitlines()[-1])
    assert sorted(history) == names
    assert np.shape(list(history.values())) == (len(names), 2)  # two epochs each
    assert np.isfinite(list(history.values())).all()
    falls = FALLS.get(name, "loss")
    assert history[falls][1] < history[falls][0]
    assert PRINTS.get(name, "Epoch 2/2") in run.stdout
    assert run.stdout.count("Epoch ") == 2


@pytest.mark.parametrize("name", [*SMALLER, PROOF])
def test_an_example_is_the_command_that_it_documents(name):
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert f"\n    python -m examples.{name}\n" in text
    assert text.endswith('\n\nif __name__ == "__main__":\n    main()\n')


@pytest.mark.matrix
def test_the_gan_draws_a_grid_of_digits_after_each_epoch(tmp_path):
    run = python("-c", "import sys\nfrom examples import gan\n"
                       "gan.main(examples=256, epochs=2, directory=sys.argv[1])", str(tmp_path))
    assert run.returncode == 0, run.stderr[-3000:]
    grids = [plt.imread(tmp_path / f"epoch_{epoch}.png") for epoch in (1, 2)]
    assert [grid.shape for grid in grids] == [(168, 168), (168, 168)]
    digits = grids[1].reshape(6, 28, 6, 28).transpose(0, 2, 1, 3).reshape(36, 28, 28)
    assert len({digit.tobytes() for digit in digits}) == 36
    assert np.any(grids[0] != grids[1])


@pytest.mark.matrix
def test_what_others_get_wrong_is_wrong_there_and_right_on_towers():
    run = python("-c", "import json\nfrom examples import what_others_get_wrong as proof\n"
                       "proof.DEVICES = 2\n"
                       "print(json.dumps(list(proof.main(epochs=1).values())))")
    assert run.returncode == 0, run.stderr[-3000:]
    rows = json.loads(run.stdout.splitlines()[-1])
    for row in rows:
        assert row["Keras, 1 device"] <= 1e-15 and row["towers"] <= 1e-15
    even, ragged, clipped, accumulated = (row["MirroredStrategy"] for row in rows)
    assert even <= 1e-15
    assert ragged > 1e-3 and clipped > 1e-3
    assert accumulated is None
    assert "MirroredStrategy: RuntimeError: " in run.stdout
