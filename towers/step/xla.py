"""Whether XLA compiles the towers: as Keras decides on GPUs; on CPUs, where loops are small."""

import warnings
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from towers.machine.devices import FIRST, count_cores, has_gpus, intra_op_threads, is_gpu
from towers.machine.keras_internals import all_layers
from towers.step.compiled import COMPILED
from towers.step.synchronized import synchronized_layers

L = keras.layers
_LOOPS = (L.GRU, L.LSTM, L.SimpleRNN)
# Measured on 2 cores, two layers of 32 to 1024 units: up to 256 units GRUs 1.2 to 4 times as fast,
# LSTMs 1.03 and more; with 512 as fast, with 1024 slower. Large convolutions were not tried.
_MOST_UNITS = 256
_BESIDE_LOOPS = (
    L.GRUCell, L.LSTMCell, L.SimpleRNNCell, L.Bidirectional, L.TimeDistributed, L.InputLayer,
    L.Embedding, L.CategoryEncoding, L.Masking, L.Rescaling, L.Reshape, L.Flatten, L.RepeatVector,
    L.Dense, L.Activation, L.ReLU, L.Softmax, L.Dropout, L.SpatialDropout1D, L.GaussianNoise,
    L.LayerNormalization, L.BatchNormalization, L.GlobalAveragePooling1D, L.GlobalMaxPooling1D,
    L.Add, L.Concatenate, L.Multiply,
)


def compiles(
    model: keras.Model,
    devices: Sequence[str],
    jit_compile: bool | str,
    num_towers: int,
    loss: Any,
    batch_norm: str | None,
) -> bool:
    """Whether XLA compiles the towers.

    Args:
        model: compiled or not.
        devices: the towers'.
        jit_compile: "auto": as Keras decides, where there are GPUs and every layer supports it, but
            not for towers beside these GPUs. On a machine without GPUs it is where `small_loops`
            finds that it pays. "compiled": as the model's `compile` has read its argument; "auto"
            for a model that is not compiled.
        num_towers: T.
        loss, batch_norm: as `TowerStep` takes them.

    Raises:
        ValueError: it is True, and a layer uses operations that XLA does not know, such as
            cuDNN's, which recurrent layers take on a machine with a GPU; or a recurrent layer's
            loop is cut by synchronized BatchNormalization.
    """
    # A loop's forward and backward part, which share lists, would be in two programs.
    has_loop = any(isinstance(layer, L.RNN) for layer in all_layers(model))
    is_cut = has_loop and num_towers > 1 and bool(synchronized_layers(model, batch_norm))
    if jit_compile in ("auto", COMPILED):  # as Keras does with layers, leave alone what XLA cannot
        is_told = jit_compile == COMPILED and model.compiled
        follows = bool(model.jit_compile) and (any(map(is_gpu, devices)) or not has_gpus())
        pays = not is_told and small_loops(model, num_towers, loss)
        jit_compile = not is_cut and (follows or pays)
    elif jit_compile:
        for layer in all_layers(model):
            if not layer.supports_jit:
                raise ValueError(
                    f"jit_compile=True: XLA cannot compile layer {layer.name!r}, a "
                    f"{type(layer).__name__}. Use jit_compile=False."
                )
        if is_cut:
            raise ValueError(
                "jit_compile=True: XLA cannot compile recurrent layers in towers that meet in "
                "between, for synchronized BatchNormalization. Use jit_compile=False."
            )
    if jit_compile:
        _warn_of_threads(devices)
    return bool(jit_compile)


def small_loops(model: keras.Model, num_towers: int, loss: Any) -> bool:
    """Whether a CPU computes the model faster once XLA has compiled it.

    The loops of small recurrent layers are thousands of small operations a step, which XLA makes
    one. It compiles anew for each length of a sequence, so that lengths must not change; and only
    Keras' own layers and losses are known to hold nothing that it does not know. The devices have
    no say, since it changes the last bits.

    Args:
        model: built.
        num_towers: T.
        loss: as `TowerStep` takes it.
    """
    layers = all_layers(model)
    loops = [layer for layer in layers if type(layer) in _LOOPS]
    if not loops or has_gpus() or intra_op_threads() < min(num_towers, count_cores()):
        return False
    if any(loop.unroll or loop.units > _MOST_UNITS for loop in loops):
        return False
    if any(loop.compute_dtype not in ("float32", "float64") for loop in loops):
        return False
    inputs = getattr(model, "inputs", None) or [tf.TensorSpec([None, None])]
    return (
        all(
            type(v) in _LOOPS + _BESIDE_LOOPS or isinstance(v, keras.Model) and _is_keras(type(v))
            for v in layers
        )
        and all(None not in value.shape[1:] for value in inputs)
        and all(map(_is_keras_loss, tf.nest.flatten(loss)))
    )


def _is_keras_loss(loss: Any) -> bool:
    if isinstance(loss, keras.losses.Loss):
        loss = type(loss)
    return loss is None or isinstance(loss, str) or _is_keras(loss)


def _is_keras(definition: Any) -> bool:
    return getattr(definition, "__module__", "").startswith("keras.")


def _warn_of_threads(devices: Sequence[str]) -> None:
    """Warns where towers on a CPU would take turns once XLA compiles them."""
    threads, at_once = intra_op_threads(), min(len(devices), count_cores())
    if threads < at_once and not any(map(is_gpu, devices)):
        warnings.warn(
            f"jit_compile: XLA runs towers on TensorFlow's threads of an operation, here {threads}:"
            f" fewer than the {at_once} towers that the cores could compute at once. Call "
            f"towers.logical_cpus({len(devices)}, compiled=True) {FIRST}; other threads are other "
            "last bits.", stacklevel=4,
        )
