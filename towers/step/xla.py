"""Decides whether XLA compiles the towers, as Keras does and for small loops, and which shards."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import keras
import tensorflow as tf

from towers.machine.devices import HOST, has_gpus, is_gpu
from towers.machine.keras_internals import all_layers, auto_jit_compile
from towers.machine.loss_internals import compile_arguments
from towers.machine.user_lines import warn_user
from towers.step.compiled import COMPILED
from towers.step.metrics import overrides

FIXED_SHAPES = "fixed shapes"  # compile only batches in which nothing but the rows varies

L = keras.layers
_LOOPS = (L.GRU, L.LSTM, L.SimpleRNN)
# Measured on 2 cores with two layers of 32 to 1024 units. Up to 256 units, GRUs are 1.2 to 4 times
# as fast, LSTMs at least 1.03; 512 is as fast, 1024 slower. Large convolutions were not tried.
_MOST_UNITS = 256
_BESIDE_LOOPS = (
    L.GRUCell,
    L.LSTMCell,
    L.SimpleRNNCell,
    L.Bidirectional,
    L.TimeDistributed,
    L.InputLayer,
    L.Embedding,
    L.CategoryEncoding,
    L.Masking,
    L.Rescaling,
    L.Reshape,
    L.Flatten,
    L.RepeatVector,
    L.Dense,
    L.Activation,
    L.ReLU,
    L.Softmax,
    L.Dropout,
    L.SpatialDropout1D,
    L.GaussianNoise,
    L.LayerNormalization,
    L.BatchNormalization,
    L.GlobalAveragePooling1D,
    L.GlobalMaxPooling1D,
    L.Add,
    L.Concatenate,
    L.Multiply,
)


def refuses_xla(model: keras.Model, jit_compile: bool | str) -> bool:
    """Returns whether the user has turned XLA off, given arguments of `uses_xla`."""
    if jit_compile != COMPILED:
        return not jit_compile
    return model.compiled and not model.jit_compile and auto_jit_compile(model)


def uses_xla(
    model: keras.Model, devices: Sequence[str], jit_compile: bool | str,
    *, has_stages: bool = False, twin: keras.Model | None = None,
) -> bool | str:  # fmt: skip
    """Returns whether XLA compiles the towers, or FIXED_SHAPES, given arguments of `TowerStep`.

    has_stages: whether the layers are in stages, which XLA does not compile. A warning says so.
    twin: the compiled model whose loss counts. Default: `model`.
    jit_compile: True or False decides. "compiled" follows `model.jit_compile`, but never compiles
        CPU towers on a machine with GPUs. "auto", and "compiled" for a model that is not compiled
        or has the value that Keras chooses for "auto", return FIXED_SHAPES if `small_loops` is
        true.

    Raises ValueError if it is True, and XLA lacks operations of a layer, such as cuDNN's for
    recurrent layers on a GPU.
    """
    decision = _follows(model, devices, jit_compile, twin or model)
    if decision and has_stages:
        warn_user(
            "gpus_per_tower: XLA compiles this model only without stages, which changes the "
            "bits. If they must be equal, use jit_compile=False for both.",
        )
        return False
    return decision


def _follows(
    model: keras.Model, devices: Sequence[str], jit_compile: bool | str, twin: keras.Model
) -> bool | str:
    """Returns what follows from the argument, the model and the devices, without stages."""
    if jit_compile in ("auto", COMPILED):  # like Keras, do not compile what XLA cannot
        # Keras stores no "auto". So a model whose `compile` got False, where Keras' rule gives it,
        # counts as "auto", because most models are compiled without a value.
        is_auto = jit_compile == "auto" or bool(model.jit_compile) == auto_jit_compile(model)
        is_told = model.compiled and not is_auto
        follows = bool(model.jit_compile) and (any(map(is_gpu, devices)) or not has_gpus())
        return follows or not is_told and small_loops(twin) and FIXED_SHAPES
    for layer in all_layers(model) if jit_compile else ():
        if not layer.supports_jit:
            raise ValueError(
                f"jit_compile=True: XLA cannot compile layer {layer.name!r}, a "
                f"{type(layer).__name__}. Use jit_compile=False."
            )
    return jit_compile


def small_loops(model: keras.Model) -> bool:
    """Whether XLA makes the model faster on a machine without GPUs, for sequences of one length.

    The loops of small recurrent layers run thousands of small operations a step, which XLA fuses.
    It compiles again for each sequence length. Only Keras' layers and losses are known to use no
    operation that XLA lacks. The devices do not matter, because compiling changes the last bits.
    """
    layers = all_layers(model)
    loops = [layer for layer in layers if type(layer) in _LOOPS]
    if not loops or has_gpus():
        return False
    # A user's loss may use an operation that XLA lacks, which would end the first step.
    loss = compile_arguments(model)[0] if model.compiled else None
    losses = [value for value in tf.nest.flatten(loss) if not isinstance(value, str | None)]
    # A custom compute_loss, or any layer of a user, may use an operation that XLA lacks.
    return not overrides(model, "compute_loss") and (
        all(
            loop.units <= _MOST_UNITS
            and not loop.unroll
            and loop.compute_dtype in ("float32", "float64")
            for loop in loops
        )
        and all(
            type(v) in _LOOPS + _BESIDE_LOOPS or isinstance(v, keras.Model) and _is_keras(v)
            for v in layers
        )
        and all(map(_is_keras, losses))
    )


def _is_keras(value: object) -> bool:
    """Whether Keras defines a function, a class or the class of an object."""
    return getattr(value, "__module__", "").startswith("keras.")


class FullBatch:
    """Knows the full batch, whose shards run compiled; shards of other sizes run without XLA.

    Compiling the sizes of an uneven last batch would take seconds. The choice changes the last
    bits, so it must not depend on the steps that a process has run before.

    sizes: the examples in a full batch, by "train", "test" and "predict". EVERY compiles every
        size, and FIRST takes the size of the next batch.
    """

    EVERY, FIRST = -1, 0

    def __init__(self, size: int | None = None) -> None:
        names, value = ("train", "test", "predict"), self.EVERY if size is None else size
        with tf.device(HOST):
            self.sizes = {name: tf.Variable(value, trainable=False) for name in names}

    @contextmanager
    def first_of(self, name: str) -> Iterator[None]:
        """Inside the context, the first batch is a full one. Contexts may be nested."""
        before = self.sizes[name].numpy()
        self.sizes[name].assign(self.FIRST)
        try:
            yield
        finally:
            self.sizes[name].assign(before)

    def compiled(self, name: str, shard_sizes: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns whether each shard runs compiled: T bools, given T numbers of examples."""
        with tf.device(HOST):
            known, sizes, num_towers = self.sizes[name], tf.stack(shard_sizes), len(shard_sizes)
            full = tf.where(tf.equal(known, self.FIRST), tf.reduce_sum(sizes), known)
            known.assign(full, read_value=False)
            rows = tf.maximum(sizes, 1)  # an empty shard carries one row
            # A shard is full if its size is full / T, rounded up or down.
            is_full = tf.abs(rows * num_towers - full) < num_towers
            return tf.unstack(is_full | tf.equal(full, self.EVERY))
