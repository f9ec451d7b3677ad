"""Every rule of composites.py by itself, and models of ragged and sparse rows."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.conformance.steps import fit_alike
from tests.divide.whole_and_divided import (
    N3, Cases, assert_alike, gradient_of, kinds_without,
)  # fmt: skip
from towers.divide import composites
from towers.divide.tables import TABLES
from towers.parallel.model_state import towers_of

CASES = Cases()
L, R = keras.layers, tf.raw_ops
NM, NM2 = ("n", "m"), ("n", "m", 2)


def sparse(x):
    """The positive numbers of a tensor."""
    return tf.sparse.from_dense(tf.nn.relu(x))


def product(x, y, **transposed):
    return tf.sparse.sparse_dense_matmul(sparse(x), y, **transposed)


def dense(x, entries=None, index=tf.int64):
    """The positive numbers again, or one number in their places."""
    of_x = sparse(x)
    entries = of_x.values if entries is None else tf.cast(entries, x.dtype)
    indices, shape = (tf.cast(each, index) for each in (of_x.indices, of_x.dense_shape))
    return R.SparseToDense(
        sparse_indices=indices,
        output_shape=shape,
        sparse_values=entries,
        default_value=tf.zeros([], x.dtype),
    )


def ragged(x):
    """The positive numbers of each row, or the steps that begin with one."""
    is_positive = x > 0 if len(x.shape) == 2 else x[..., 0] > 0
    lengths = tf.math.count_nonzero(is_positive, axis=1)
    splits = tf.concat([[0], tf.cumsum(lengths)], axis=0)
    return tf.RaggedTensor.from_row_splits(tf.boolean_mask(x, is_positive), splits, validate=False)


def by_row(x):
    """The same, with the number of its row beside each entry."""
    rows = ragged(x)
    return tf.RaggedTensor.from_value_rowids(rows.values, rows.value_rowids(), rows.nrows())


def by_filled_rows(
    x, w, rows=lambda indices: indices[:, 0], total=tf.math.segment_sum, is_filled=True
):
    """Sums the entries of each row, of which empty ones get a 0, and multiplies."""
    filled, _ = tf.sparse.fill_empty_rows(sparse(x), 0.0) if is_filled else (sparse(x), None)
    numbers = tf.cast(rows(filled.indices), tf.int32)
    entries = tf.tile(filled.values[:, tf.newaxis], [1, 3])
    return R.MatMul(a=total(entries[: tf.size(numbers)], numbers), b=w)


def picked(function):
    """Returns a sum of picked entries: all of them."""
    return lambda entries, rows: function(entries, tf.range(tf.size(rows)), rows)


def of_any_rank(entries, rows):
    """A sum of entries of which TensorFlow knows nothing."""
    return tf.math.segment_sum(tf.numpy_function(np.copy, [entries], entries.dtype), rows)


def chosen(x):
    """All rows, but TensorFlow does not know how many."""
    return tf.boolean_mask(x, tf.ones([tf.shape(x)[0]], tf.bool))


def twice_ragged(x):
    """The same ragged rows, each in one more row."""
    rows = ragged(x)
    return tf.RaggedTensor.from_row_splits(rows, tf.range(rows.nrows() + 1), validate=False)


def of_length(rows, length):
    """Ragged rows, padded to a length of the batch."""
    return R.RaggedTensorToTensor(
        shape=tf.stack([-1, length]), values=rows.values, default_value=tf.zeros([], rows.dtype),
        row_partition_tensors=[rows.row_splits], row_partition_types=["ROW_SPLITS"],
    )  # fmt: skip


CASES.add("SparseToDense", dense, N3)
CASES.add("SparseToDense", dense, NM)
CASES.add("SparseToDense", dense, NM2)
CASES.add("SparseToDense", lambda x: tf.sparse.to_dense(sparse(x), x[0, 0]), N3)
CASES.add_once("SparseToDense", lambda x: dense(tf.transpose(x)), N3)
CASES.add_once("SparseToDense", lambda x: dense(tf.concat([x, x], 0)), N3)
CASES.add_once("SparseToDense", lambda x: dense(tf.matmul(x, x, transpose_b=True)), N3)
CASES.add_once("SparseToDense", lambda x: dense(tf.sort(x, axis=0)[:2]), N3)
CASES.add_once("SparseToDense", lambda x: dense(x, entries=3), N3)
CASES.add_once("SparseToDense", lambda x: dense(x, index=tf.int32), N3)
CASES.add("SparseTensorDenseMatMul", product, N3, (3, 4))
CASES.add("SparseTensorDenseMatMul", lambda x, y: product(x, y, adjoint_b=True), N3, (4, 3))
CASES.add("SparseTensorDenseMatMul", lambda x, y: product(x, y, adjoint_a=True), N3, ("n", 4))
CASES.add(
    "SparseTensorDenseMatMul",
    lambda x, y: product(x, y, adjoint_a=True, adjoint_b=True),
    N3,
    (4, "n"),
)
CASES.add("SparseTensorDenseMatMul", gradient_of(product, 1), N3, (3, 4))
CASES.add_once("SparseTensorDenseMatMul", product, N3, (3, "n"))
CASES.add_once("SparseTensorDenseMatMul", lambda x, w: product(x, chosen(w)), N3, (3, 4))
CASES.add_once("SparseTensorDenseMatMul", lambda x, y: product(tf.transpose(x), y), N3, ("n", 4))
CASES.add_once(
    "SparseTensorDenseMatMul",
    lambda x, y: product(x, tf.sort(y, axis=0), adjoint_a=True),
    N3,
    ("n", 4),
)
CASES.add("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(), NM)
CASES.add("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(x[0, 0]), NM2)
CASES.add("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(shape=[None, 2]), NM)
CASES.add("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(shape=[None, None, 2]), NM2)
CASES.add("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(shape=[None, 9]), N3)
CASES.add_once("RaggedTensorToTensor", lambda x: ragged(tf.concat([x, x], 0)).to_tensor(), NM)
CASES.add_once("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(shape=[4, None]), NM)
CASES.add_once("RaggedTensorToTensor", lambda x: by_row(x).to_tensor(), NM)
CASES.add_once("RaggedTensorToTensor", lambda x: twice_ragged(x).to_tensor(), NM)
CASES.add_once("RaggedTensorToTensor", lambda x: ragged(chosen(x)).to_tensor(), NM)
CASES.add_once("RaggedTensorToTensor", lambda x: of_length(ragged(x), tf.shape(x)[1]), NM)
for total in (tf.math.segment_sum, tf.math.segment_mean):
    CASES.add("MatMul", partial(by_filled_rows, total=total), N3, (3, 4))
for total in (tf.sparse.segment_sum, tf.sparse.segment_mean, tf.sparse.segment_sqrt_n):
    CASES.add("MatMul", partial(by_filled_rows, total=picked(total)), N3, (3, 4))
CASES.add("MatMul", lambda x, w: keras.ops.matmul(keras.ops.matmul(sparse(x), w), w), N3, (3, 3))
CASES.add_once("MatMul", partial(by_filled_rows, is_filled=False), N3, (3, 4))
CASES.add_once("MatMul", partial(by_filled_rows, total=of_any_rank), N3, (3, 4))
CASES.add_once("MatMul", partial(by_filled_rows, rows=lambda r: r[:, 0 * tf.size(r)]), N3, (3, 4))
CASES.add_once("MatMul", partial(by_filled_rows, rows=lambda r: r[:, 1]), ("n", 1), (3, 4))
CASES.add_once("MatMul", partial(by_filled_rows, rows=lambda r: r[:-1, 0]), N3, (3, 4))
CASES.add_once("MatMul", partial(by_filled_rows, rows=lambda r: r[::2, 0]), N3, (3, 4))
CASES.add_once("MatMul", partial(by_filled_rows, rows=lambda r: r[:, 0] // 2), N3, (3, 4))
ONE_LENGTH = Cases()  # no size is open but the number of rows
ONE_LENGTH.add_once("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(), N3)
ONE_LENGTH.add("RaggedTensorToTensor", lambda x: ragged(x).to_tensor(shape=[None, 9]), N3)


@pytest.mark.parametrize(
    "cases", [*CASES.groups, ONE_LENGTH], ids=lambda cases: f"{cases[0].kind}-{cases[-1].kind}"
)
def test_it_is_divided_as_far_as_it_may_be_and_computes_the_same(cases):
    assert_alike(cases)


def test_every_rule_has_a_case_that_is_divided():
    assert kinds_without(TABLES, composites, CASES) == set()


class ToDense(L.Layer):
    """Makes a dense tensor of ragged or sparse rows."""

    def call(self, x):
        return x.to_tensor() if isinstance(x, tf.RaggedTensor) else tf.sparse.to_dense(x)

    def compute_output_shape(self, shape):
        return shape


def reader_of_tokens():
    """Reads ragged tokens by a recurrent layer."""
    tokens = keras.Input((None,), dtype="int32", ragged=True)
    embedded = L.Embedding(9, 3, mask_zero=True)(ToDense()(tokens))
    return keras.Model(tokens, L.Dense(1)(L.GRU(4)(embedded)))


def reader_of_words():
    """Reads sparse words by a dense layer, and as a dense tensor."""
    words = keras.Input((6,), sparse=True)
    both = L.Concatenate()([L.Dense(5, "relu")(words), ToDense()(words)])
    return keras.Model(words, L.Dense(1)(L.Dense(4, "tanh")(both)))


@pytest.mark.filterwarnings("error::towers.machine.user_lines.TowersWarning")
@pytest.mark.parametrize("reader", [reader_of_tokens, reader_of_words])
def test_towers_share_what_follows_ragged_and_sparse_rows(reader, float64):
    rng = np.random.default_rng(0)
    if reader is reader_of_tokens:
        lengths = rng.integers(0, 6, 14)
        lengths[11:] = [0, 2, 0]  # a last batch of fewer rows than towers
        x = tf.RaggedTensor.from_row_lengths(rng.integers(1, 9, lengths.sum()), lengths)
        x = tf.cast(x, tf.int32)
    else:
        x = tf.sparse.from_dense(rng.normal(size=(14, 6)) * (rng.random((14, 6)) < 0.3))

    def make():
        model = reader()
        model.compile("adam", "mse")
        return model

    y = rng.normal(size=(14, 1))
    theirs, ours = fit_alike(make, x, y, num_towers=4, batch_size=11, epochs=2)
    ((_, divided),) = towers_of(ours).steps["train"].traces.values()
    run_once = {op.type for op in divided.ops if op.in_towers is None}
    assert not run_once & {
        "MatMul",
        "While",
        "StatelessWhile",
        "RaggedTensorToTensor",
        "SparseToDense",
    }
    # Predictions have no labels, which would tell the number of rows.
    predicted = (model.predict(x, batch_size=11, verbose=0) for model in (theirs, ours))
    np.testing.assert_allclose(*predicted, rtol=1e-10)
