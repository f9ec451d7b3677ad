"""Compares the memory that --plan estimates for a step with the memory that a process takes for it.

    python benchmarks/memory.py --models=MobileNetV2,gpt2

Each model runs in its own process on the CPU. It makes a step with few rows and a
step with many. The peaks of resident memory differ by what the rows take. This is compared with the
difference of the estimates. bert, gpt2, llama and vit are small models of KerasHub, which must be
installed.

Without oneDNN, and with the settings below, each tensor gets its own memory, and gives it back.
"""

import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from absl import app, flags

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import rounds
from benchmarks.process import run_process
from towers.machine.words import counted

APPLICATIONS = (
    "DenseNet121 EfficientNetB0 InceptionV3 MobileNetV2 NASNetMobile ResNet50 VGG16 Xception"
).split()
_TEXT = {
    "vocabulary_size": 1000, "num_layers": 4, "hidden_dim": 128, "intermediate_dim": 512,
}  # fmt: skip
HUB: dict[str, dict[str, Any]] = {
    "bert": {"cls": "BertBackbone", **_TEXT, "num_heads": 4, "max_sequence_length": 128},
    "gpt2": {"cls": "GPT2Backbone", **_TEXT, "num_heads": 4, "max_sequence_length": 128},
    "llama": {
        "cls": "LlamaBackbone", **_TEXT, "num_query_heads": 4, "num_key_value_heads": 2,
    },
    "vit": {
        "cls": "ViTBackbone", "image_shape": (96, 96, 3), "patch_size": (16, 16), "num_layers": 4,
        "num_heads": 4, "hidden_dim": 128, "mlp_dim": 512,
    },
}  # fmt: skip
_SETTINGS = {
    "TF_ENABLE_ONEDNN_OPTS": "0",
    "MALLOC_MMAP_THRESHOLD_": "32768",
    "MALLOC_MMAP_MAX_": "1000000",
    "MALLOC_ARENA_MAX": "1",
}
_CLASSES, _PIXELS, _TOKENS = 10, 96, 64

_MODELS = flags.DEFINE_list(
    "models",
    [*APPLICATIONS, *(HUB if find_spec("keras_hub") else ())],
    "Models of keras.applications, and models of KerasHub if it is installed.",
)
_MEGABYTES = flags.DEFINE_integer("megabytes", 500, "The estimate for the step with many rows.", 1)
_TOWERS = flags.DEFINE_integer("num_towers", 1, "Towers, which take turns on the CPU.", 1)
_OUT = flags.DEFINE_string("out", None, "CSV to append to.")


def build(name: str) -> Any:
    """Returns a classifier with random weights."""
    import keras

    if name in APPLICATIONS:
        make = getattr(keras.applications, name)
        return make(weights=None, input_shape=(_PIXELS, _PIXELS, 3), classes=_CLASSES)
    import keras_hub

    given = dict(HUB[name])
    backbone = getattr(keras_hub.models, given.pop("cls"))(**given)
    if name == "vit":
        inputs: Any = keras.Input(given["image_shape"])
    else:
        inputs = {key: keras.Input((_TOKENS,), dtype="int32", name=key) for key in backbone.input}
    outputs = backbone(inputs)
    features = outputs["sequence_output"] if isinstance(outputs, dict) else outputs
    pooled = keras.layers.GlobalAveragePooling1D()(features)
    return keras.Model(inputs, keras.layers.Dense(_CLASSES, activation="softmax")(pooled))


def measure(model: str, megabytes: int, num_towers: int) -> dict[str, Any]:
    """Returns the growth of the estimate and of the process, in MB, and the numbers of rows."""
    import tensorflow as tf

    import towers
    from towers.app.diagnosis.liveness import tower_memory
    from towers.machine.devices import CPU

    built = build(model)
    step = towers.TowerStep(
        built, "sgd", "sparse_categorical_crossentropy", num_towers=num_towers,
        jit_compile=False, devices=["/cpu:0"], policy=replace(CPU, take_turns=True),
    )  # fmt: skip

    def batch(rows: int) -> tuple[Any, tf.Tensor]:
        def ones(given: Any) -> tf.Tensor:
            return tf.ones((rows, *given.shape[1:]), given.dtype)

        return tf.nest.map_structure(ones, built.input), tf.zeros(rows, "int32")

    def peak(x: Any, y: tf.Tensor) -> int:
        Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
        step(x, y)
        words = Path("/proc/self/status").read_text().split()
        return int(words[words.index("VmHWM:") + 1]) * 1024

    step(*batch(2 * num_towers))  # traces

    def estimate(rows: int) -> int:  # of a tower
        return tower_memory(step.phases(), rows).activations(num_towers)

    few = max(1, int(megabytes * 1e6 / estimate(100) * 100 / 4))
    many = 4 * few
    batches = [batch(rows * num_towers) for rows in (few, many)]
    measured = [peak(*given) for given in batches]
    return {
        "estimate": (estimate(many) - estimate(few)) / 1e6,
        "measured": (measured[1] - measured[0]) / 1e6,
        "rows": [few * num_towers, many * num_towers],
        "device": "CPU",
    }


def main(argv: list[str]) -> None:
    """Measures, prints, and appends to the CSV."""
    del argv
    os.environ.update(_SETTINGS)
    rows: list[dict[str, Any]] = []
    for name in _MODELS.value:
        given: dict[str, Any] = {"megabytes": _MEGABYTES.value, "num_towers": _TOWERS.value}
        found = run_process("memory.measure", model=name, **given)
        ratio = found["estimate"] / found["measured"]
        few, many = found["rows"]
        print(
            f"{name}: estimate {found['estimate']:.0f} MB, measured {found['measured']:.0f} MB "
            f"({few} and {many} rows): {ratio:.2f}", flush=True,
        )  # fmt: skip
        rows.append({
            "benchmark": "memory", "workload": name, "num_devices": 1,
            "contender": f"estimate, {counted(_TOWERS.value, 'tower')}",
            "peer": "process", "measure": "megabytes", "round": 0, "value": found["estimate"],
            "peer_value": found["measured"], "ratio": ratio,
        })  # fmt: skip
    rounds.append_csv(_OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
