"""The workloads of gpu.py: as large as a GPU deserves, or small enough to rehearse on a CPU."""

from collections.abc import Callable
from dataclasses import replace

import keras

from benchmarks.workloads import WORKLOADS, Workload, built_in, momentum
from towers.app.models import builtin
from towers.app.models.builtin import build_bottlenecks

_LARGEST_PASS = 10  # distinct batches; more steps repeat them
_PASS_BYTES = 512 * 2**20  # of inputs, at most, but for two batches


def load(name: str, batch_size: int, precision: str = "float32", small: bool = False) -> Workload:
    """A workload of this file.

    Args:
        name: one of `NAMES`.
        batch_size: the global batch.
        precision: a Keras dtype policy: "float32", "mixed_float16" or "mixed_bfloat16".
        small: the same kinds of layers, as few and as narrow as may be: its speed says nothing.
    """
    workload = (_SMALL if small else _FULL)[name]()
    return in_precision(replace(workload, batch_size=batch_size), precision)


def in_precision(workload: Workload, precision: str) -> Workload:
    """The workload under a Keras dtype policy; with a scaled loss where float16 may underflow."""

    def build() -> keras.Model:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(precision)
        try:
            return workload.build()
        finally:
            keras.config.set_dtype_policy(before)

    def optimizer() -> keras.optimizers.Optimizer:
        inner = workload.optimizer()
        if precision == "mixed_float16":  # `fit` would wrap it by itself
            return keras.optimizers.LossScaleOptimizer(inner)
        return inner

    return replace(workload, build=build, optimizer=optimizer)


def batches_a_pass(workload: Workload) -> int:
    """The number of distinct batches that fit into the memory meant for them; 2 to 10."""
    x, _ = replace(workload, batch_size=1).data(1)
    return max(2, min(_LARGEST_PASS, _PASS_BYTES // (x.nbytes * workload.batch_size)))


def small_mlp() -> keras.Model:
    """80-40-20-10-6-1, tanh: the wide MLP's shape."""
    widths = (40, 20, 10, 6)
    return keras.Sequential([
        keras.Input((80,)),
        *(keras.layers.Dense(width, activation="tanh") for width in widths),
        keras.layers.Dense(1, activation="sigmoid"),
    ])


def small_gru() -> keras.Model:
    """Four GRU layers of 8 units."""
    return builtin.rnn(
        "gru_small", keras.layers.GRU, (6, 16), 16, num_layers=4, units=8, dense_units=8
    )


def small_resnet() -> keras.Model:
    """Bottlenecks as in ResNet-50, 1 in each of 2 stages, for 32x32 images."""
    return build_bottlenecks("resnet_small", (32, 32, 3), 10, num_blocks=(1, 1), filters=8)


_FULL: dict[str, Callable[[], Workload]] = {
    "cnn": WORKLOADS["cnn"],
    "notebook_cnn": WORKLOADS["notebook_cnn"],
    "mlp41m": WORKLOADS["mlp41m"],
    "resnet50": lambda: built_in("resnet50", momentum, 256, 0),
    "gru": lambda: built_in("gru_large", keras.optimizers.Adam, 512, 0),
}
_SMALL: dict[str, Callable[[], Workload]] = {
    "cnn": WORKLOADS["cnn"],
    "notebook_cnn": WORKLOADS["notebook_cnn"],
    "mlp41m": lambda: Workload(small_mlp, keras.optimizers.Adam, 8, (80,), 1, 0),
    "resnet50": lambda: Workload(small_resnet, momentum, 8, (32, 32, 3), 10, 0),
    "gru": lambda: Workload(small_gru, keras.optimizers.Adam, 8, (6, 16), 16, 0),
}
NAMES = tuple(_FULL)
