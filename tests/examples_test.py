"""Every example runs to its end, in a smaller size."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

SMALLER = {
    "wide_mlp": "INPUTS = 100; WIDTHS = (50, 20); ROWS = 300; GLOBAL_BATCH = 128",
    "melodies": "LAYER = keras.layers.LSTM; UNITS = 8; EXAMPLES = 300; EPOCHS = 1; "
                "music.load = small(music.load)",
    "two_inputs": "PAIRS = 1200; EPOCHS = 2",
    "transfer": "EXAMPLES = 64; EPOCHS = 1; GLOBAL_BATCH = 32; "
                "keras.applications.ResNet50V2 = keras.applications.MobileNet",
    "autoencoder": "EXAMPLES = 1500; EPOCHS = 2",
}

# Runs the example as a main program, after its constants are set to others.
RUN = """
import dataclasses, sys
from pathlib import Path
import keras

def small(load):
    def load_small():
        data = load()
        return dataclasses.replace(data, test=tuple(part[:100] for part in data.test))
    return load_small

source = Path(sys.argv[1]).read_text()
definitions, main = source.split("def main()")
exec(compile(definitions + sys.argv[2] + "\\n\\ndef main()" + main, sys.argv[1], "exec"))
"""


def test_no_example_is_left_out():
    assert set(SMALLER) == {path.stem for path in (ROOT / "examples").glob("*.py")}


@pytest.mark.parametrize("name", SMALLER)
def test_example(name):
    path = ROOT / "examples" / f"{name}.py"
    assert f"python -m examples.{name}\n" in path.read_text()
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(path), SMALLER[name]], cwd=ROOT, text=True,
        capture_output=True, env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    losses = [float(value) for value in re.findall(r" loss: ([\d.e+-]+|nan)", run.stdout)]
    assert losses and all(math.isfinite(loss) for loss in losses), run.stdout
    assert losses[-1] < losses[0] or len(losses) == 1
