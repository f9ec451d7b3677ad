"""A trial of layers on a few made-up rows: does a row of the output depend on that row alone?

    output of rows 0 ... 2    =    the same after rows 3 and 4 were changed ?

A layer that computes across rows is found before the first step. The trial takes a few
milliseconds. Keras' own layers keep rows apart, and are not tried.
"""

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from towers.machine.keras_internals import (
    all_layers,
    moments_replaced,
    stored_value,
)
from towers.machine.tensorflow_internals import recomputed_by
from towers.step.fixed_batch import BatchInCode, check_open_batch
from towers.step.structures import Structure, any_rows, map_tensors
from towers.step.tensor_rows import is_composite, join_rows, take_rows

_NUM_ROWS, _FIRST_PART = 5, 3
_LENGTHS = [2, 1, 2, 3, 4]  # of ragged rows: the longest is among the last
_OPEN = 32  # rows' own dimensions that are open: time steps, pixels
_STACK = re.compile(r"\s*($|File |<stack traces|Detected at|Graph execution error)")
_TOLERANCE = 1e-4  # relative, of losses, in float32; outputs are computed alike, in any precision


class Trials:
    """The trial of a model, made once, as soon as its inputs are known."""

    def __init__(self, model: keras.Model) -> None:
        self._model, self._is_done = model, False

    def run(self, x: Structure) -> None:
        """Runs `check_rows_apart` once.

        Args: x: symbolic inputs [n, ...], or their specs.
        """
        if not self._is_done:
            check_rows_apart(self._model, x)
            self._is_done = True


def check_rows_apart(model: keras.Model, x: Structure) -> None:
    """Finds out whether a model's output for a row depends on other rows of the batch.

    Its own BatchNormalization layers do, by nature, and are left out.

    Args:
        model: built. Models of Keras' own layers alone are not tried.
        x: symbolic inputs, or their specs.

    Raises:
        BatchInCode: it is one of a fixed number of rows.

    Warns:
        UserWarning: it does, or it cannot be found out.
    """
    names = unknown_parts(model)
    if not names:
        return
    what = f"model {model.name!r} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})"
    try:
        with tf.init_scope(), tf.device("/cpu:0"):
            rows = map_tensors(made_up, x)
            before, again, after = _run(model, [rows, rows, map_tensors(_with_other_last, rows)])
    except Exception as error:
        _refuse_fixed_batch(lambda x: model(x, training=True), x)
        _warn_untried(what, error)
        return
    if not _are_alike(before, again):  # noise without a seed, of which every row has its own
        return
    if not _are_alike(before, after):
        warnings.warn(
            f"{what} computes across the rows of a batch: the output of one row depends on the "
            "others, and a tower knows only those of its shard. Use towers.gather(rows) where a "
            "layer needs the rows of all towers, with towers.make_parallel(model, gpus). Give what "
            "is padded to the longest row one length: TextVectorization(output_sequence_length=N), "
            "ragged.to_tensor(shape=[None, N]).",
            stacklevel=2,
        )


def first_across_rows(model: keras.Model, rows: Structure) -> str | None:
    """The first layer whose output for a row depends on other rows; None: none is found.

    Args:
        model: built.
        rows: inputs [5, ...] of the model.
    """
    names: list[str] = []

    def call(x: Structure) -> list[tf.Tensor]:
        noted: list[tuple[str, Any]] = []
        with ExitStack() as stack:
            for layer in all_layers(model):
                stack.enter_context(_noting(layer, noted))
            model(x, training=True)
        graph = tf.compat.v1.get_default_graph()  # a loop's body has one of its own
        pairs = [
            (name, tensor) for name, outputs in noted for tensor in tf.nest.flatten(outputs)
            if tf.is_tensor(tensor) and tensor.graph is graph
        ]
        names[:] = [name for name, _ in pairs]
        return [tensor for _, tensor in pairs]

    before, again, after = _run(model, [rows, rows, map_tensors(_with_other_last, rows)], call)
    each = zip(names, before, again, after, strict=True)
    return next(
        (name for name, a, b, c in each if _are_alike([a], [b]) and not _are_alike([a], [c])), None
    )


@contextmanager
def _noting(layer: keras.layers.Layer, noted: list[tuple[str, Any]]) -> Iterator[None]:
    """Within, each call of a layer adds (its name, its outputs)."""
    call = layer.call

    @wraps(call)
    def noting(*args: Any, **options: Any) -> Any:
        outputs = call(*args, **options)
        noted.append((layer.name, outputs))
        return outputs

    vars(layer)["call"] = noting  # not through setattr, which would track it
    try:
        yield
    finally:
        del vars(layer)["call"]


def made_up(spec: Any) -> Any:
    """5 rows that fit a spec [n, ...].

    Floats lie between 0.1 and 0.9, as a probability or a pixel may, larger in later rows; integers
    are 0 or 1, as a class, a token or a mask may.
    """
    generator = np.random.default_rng(7)

    def values(count: int, shape: Sequence[int | None], dtype: tf.DType) -> tf.Tensor:
        size = [count, *(_OPEN if n is None else n for n in shape)]
        if dtype == tf.string:  # the longest texts are among the last
            rows = np.array(["a"] * _FIRST_PART + ["a a a"] * (count - _FIRST_PART))
            return tf.broadcast_to(rows.reshape([count, *[1] * (len(size) - 1)]), size)
        if dtype.is_floating:
            rows = np.linspace(0.3, 0.9, count).reshape([count, *[1] * (len(size) - 1)])
            return tf.cast(generator.uniform(0.1, rows, size), dtype)
        draws = generator.integers(0, 2, size)
        draws.flat[:2], draws.flat[-2:] = (0, 1), (1, 0)
        return tf.cast(draws, dtype)

    if isinstance(spec, tf.RaggedTensor | tf.RaggedTensorSpec):
        lengths = [_LENGTHS]
        for size in spec.shape[2:1 + any_rows(spec).ragged_rank]:
            lengths.append([size or 1 + i % 2 for i in range(sum(lengths[-1]))])
        flat = values(sum(lengths[-1]), spec.shape[1 + len(lengths):], spec.dtype)
        return tf.RaggedTensor.from_nested_row_lengths(flat, lengths)
    rows = values(_NUM_ROWS, spec.shape[1:], spec.dtype)
    if isinstance(spec, tf.SparseTensor | tf.SparseTensorSpec):
        entries = tf.where(generator.integers(0, 2, rows.shape))
        return tf.SparseTensor(entries, tf.gather_nd(rows, entries), rows.shape)
    return rows


def _with_other_last(rows: Any) -> Any:
    """The rows, the last of which are replaced by the first."""
    first, others = [_FIRST_PART], [_NUM_ROWS - _FIRST_PART]
    return join_rows([take_rows(rows, [0], first), take_rows(rows, [0], others)])


def unknown_parts(model: keras.Model) -> list[str]:
    """The names of what may compute across rows: layers and operations that are not Keras' own."""
    layers = all_layers(model)
    unknown = [
        layer for layer in layers
        if not type(layer).__module__.startswith("keras.src.")
        or isinstance(layer, keras.layers.Lambda)
        or _pads_to_the_longest(layer)
    ]
    operations = [
        operation for layer in layers for operation in getattr(layer, "operations", [])
        if not isinstance(operation, keras.layers.Layer)
    ]
    return [part.name for part in [*unknown, *operations]]


def _pads_to_the_longest(layer: keras.layers.Layer) -> bool:
    """Whether a layer of Keras' makes texts as long as the longest of the batch."""
    if not isinstance(layer, keras.layers.TextVectorization):
        return False
    config = layer.get_config()
    is_open = config["output_sequence_length"] is None and not config["ragged"]
    return config["output_mode"] == "int" and is_open


def _run(
    model: keras.Model, batches: Sequence[Structure], call: Callable | None = None
) -> list[list[np.ndarray]]:
    """The first rows of all outputs in training mode, for each batch; the model's state is kept.

    What has not as many rows as the batch gives an empty array.

    Args:
        model: built.
        batches: inputs [5, ...].
        call: inputs -> outputs; None: the model in training mode.
    """
    state, outputs_of = model.non_trainable_variables, call or partial(model, training=True)

    def forward(x: Structure) -> list[tf.Tensor]:
        with ExitStack() as stack:
            for layer in all_layers(model):
                if isinstance(layer, keras.layers.BatchNormalization):
                    stack.enter_context(moments_replaced(layer, _moments_of(layer)))
            stack.enter_context(keras.StatelessScope(
                state_mapping=[(v, tf.convert_to_tensor(v.value)) for v in state]
            ))
            stack.enter_context(recomputed_by(lambda f, args, kwargs: f(*args, **kwargs)))
            outputs = tf.nest.flatten(outputs_of(x))
        return [_dense(v) for v in outputs]

    specs = map_tensors(any_rows, batches[0])
    traced = tf.function(forward, autograph=False).get_concrete_function(specs)
    has_rows = [v.shape.rank is None or v.shape[:1] == [None] for v in traced.structured_outputs]
    known = {id(stored_value(variable)) for variable in model.variables}
    before = [(v, v.read_value()) for v in traced.variables if id(v) not in known]
    try:
        found = [traced(batch) for batch in batches]
    finally:
        for variable, value in before:
            variable.assign(value)
    return [
        [
            v.numpy()[:_FIRST_PART] if v.shape[:1] == [_NUM_ROWS] and is_open else np.empty(0)
            for v, is_open in zip(outputs, has_rows, strict=True)
        ]
        for outputs in found
    ]


def _dense(tensor: Any) -> tf.Tensor:
    """The first rows of 5, as a dense tensor, and 2 more: the last may make others longer."""
    if is_composite(tensor):
        tensor = _with_other_last(tensor)
    if isinstance(tensor, tf.SparseTensor):
        return tf.sparse.to_dense(tensor)
    return tensor.to_tensor() if isinstance(tensor, tf.RaggedTensor) else tensor


def _moments_of(layer: keras.layers.BatchNormalization) -> Callable:
    """A function that returns mean 0 and variance 1 in place of any batch's."""

    def moments(inputs: tf.Tensor, mask: Any = None) -> tuple[tf.Tensor, tf.Tensor]:
        del mask
        size = [inputs.shape[layer.axis]]
        return tf.zeros(size, inputs.dtype), tf.ones(size, inputs.dtype)

    return moments


def _are_alike(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> bool:
    return all(_is_alike(a, b) for a, b in zip(some, others, strict=True))


def _is_alike(a: np.ndarray, b: np.ndarray) -> bool:
    if a.shape != b.shape or a.dtype == object:  # of strings
        return np.array_equal(a, b)
    return np.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE * np.max(np.abs(a), initial=0))


def _refuse_fixed_batch(function: Callable, *rows: Any) -> None:
    """Raises BatchInCode, by `check_open_batch`; a function that cannot be traced passes."""
    try:
        with tf.init_scope(), tf.device("/cpu:0"), keras.StatelessScope():
            check_open_batch(function, *rows)
    except BatchInCode:
        raise
    except Exception:
        return


def _warn_untried(what: str, why: Any) -> None:
    told = [line.strip() for line in str(why).splitlines() if not _STACK.match(line)]
    reason = told[0] if told else type(why).__name__
    warnings.warn(
        f"{what} could not be tried on made-up rows ({reason}): whether towers give the large "
        "batch's results is not known. Compare the gradients of the first batch: python "
        "train.py --verify_gradients, or TowerStep.gradients with 1 tower and with several.",
        stacklevel=3,
    )
