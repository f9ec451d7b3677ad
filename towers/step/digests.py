"""Makes digests, by which two people or two runs tell whether they have equal values.

digest             eight digits of a model's weights, from the bytes on the host
variable_digest    sixteen digits of one variable
sum_of_bits        a number of tensors, computed where they are; it takes 1 ns for a value
"""

import hashlib

import keras
import numpy as np
import tensorflow as tf

from towers.step.structures import Structure

# The constants of splitmix64, whose outputs pass tests of randomness (Steele, Lea and Flood, "Fast
# Splittable Pseudorandom Number Generators", 2014).
_STEP, _FIRST, _SECOND = (
    np.uint64(number).astype(np.int64)
    for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def digest(model: keras.Model) -> str:
    """Returns eight hexadecimal digits that tell whether two models have the same weights.

    They begin the SHA-256 of the bytes of all values of `model.weights`, in their order. Seeds of
    random numbers and metrics do not count.

    Args:
        model: a model with weights. A model that has only trained by its own `train_step` counts
            as not built in Keras, and has weights all the same.

    Raises:
        ValueError: the model has no weights yet, because it is not built.
    """
    if not model.built and not model.weights:
        raise ValueError(f"model ({model.name}) is not built. Call it on a batch, or `build` it.")
    found = hashlib.sha256()
    for weight in model.weights:
        found.update(weight.numpy().tobytes())
    return found.hexdigest()[:8]


def variable_digest(variable: keras.Variable) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of a variable's dtype, shape and bits."""
    value = variable.value.numpy()
    return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()[:16]


def sum_of_bits(structure: Structure) -> tf.Tensor:
    """Returns a number, scalar int64, that changes if a bit of a tensor changes, or its place.

        sum over tensors k, rows r and columns c:  a(k) * a(r) * b(c) * bits(k, r, c)

    a and b are pseudo-random odd numbers, so that two rows, columns or tensors cannot change
    places unseen. Integers wrap around at 2**64, so the order of the additions changes nothing.

    structure: tensors of any dtype and shape, also ragged and sparse ones; None parts are skipped.
    """
    tensors = [v for v in tf.nest.flatten(structure, expand_composites=True) if v is not None]
    tables = [_table(tensor) for tensor in tensors]
    most = tf.reduce_max(tf.concat([[len(tables)], *map(tf.shape, tables)], axis=0))
    of_rows, of_columns = tf.unstack(tf.reshape(_odd_numbers(2 * most), [-1, 2]), axis=1)
    total = tf.zeros([], tf.int64)
    for i, (tensor, table) in enumerate(zip(tensors, tables, strict=True)):
        with tf.device(tensor.device):
            num_rows, num_columns = tf.unstack(tf.shape(table))
            rows = tf.reduce_sum(table * of_columns[:num_columns], axis=1)
            found = tf.reduce_sum(rows * of_rows[:num_rows])
        # The size tells a batch from the same one with more zeros.
        total += of_rows[i] * (found + tf.size(table, tf.int64))
    return total


def as_digits(number: tf.Tensor | np.int64) -> str:
    """Returns an int64 number as 16 hexadecimal digits."""
    return f"{int(number) % 2**64:016x}"


def _table(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the bits of a tensor as int64 [rows, columns]; each is at most 32 bits, or a text."""
    with tf.device(tensor.device):
        if tensor.dtype == tf.string:
            bits = tf.strings.to_hash_bucket_fast(tensor, 2**63 - 1)
        elif tensor.dtype == tf.bool:
            bits = tensor
        else:
            # A double's bits often end in 32 zeros or more, which a factor would push out.
            bits = tf.bitcast(tensor, {1: tf.int8, 2: tf.int16}.get(tensor.dtype.size, tf.int32))
        num_rows = tf.shape(bits)[0] if bits.shape.rank else 1
        columns = tf.size(bits) // tf.maximum(num_rows, 1)
        return tf.reshape(tf.cast(bits, tf.int64), [num_rows, columns])


def _odd_numbers(count: tf.Tensor) -> tf.Tensor:
    """Returns `count` pseudo-random odd numbers, int64, the same in every call."""
    values = (tf.range(tf.cast(count, tf.int64)) + 1) * _STEP
    for shift, factor in ((30, _FIRST), (27, _SECOND), (31, np.int64(1))):
        shifted = tf.bitwise.right_shift(values, np.int64(shift))
        values = tf.bitwise.bitwise_xor(values, shifted) * factor
    return tf.bitwise.bitwise_or(values, np.int64(1))
