"""Whether towers' values of a tensor make the global batch's."""

import warnings

import keras
import pytest
import tensorflow as tf

from towers.graph.rows import Rows

L, ops = keras.layers, keras.ops


def kind_of(make):
    """The `Kind` of what make(x) makes of a shard's rows x, [n, 3] of float32, in a function."""
    found = []

    def body(x):
        value = tf.convert_to_tensor(make(x))
        found.append(Rows.of_shard([x]).kind(tf.cast(value, tf.float32)))
        return value

    tf.function(body, autograph=False).get_concrete_function(tf.TensorSpec([None, 3]))
    return found[-1]


def count(x):
    """The number of a shard's rows."""
    return tf.cast(tf.shape(x)[0], x.dtype)


def positive(x):
    """A mask of the rows."""
    return x[:, 0] > 0


def places(x):
    return tf.range(tf.shape(x)[0])


def summed(body):
    """What 3 rounds of a loop add up."""
    return lambda x: tf.while_loop(
        lambda i, total: i < 3, lambda i, total: (i + 1, body(total, x)), [0, 0.0])[1]


def each_row(make, x):
    """Returns make(i, total)[1] for each row; its first result is the next row's total."""
    def body(i, total, results):
        total, result = make(i, total)
        return i + 1, total, results.write(i, result)

    start = 0, tf.zeros([3]), tf.TensorArray(tf.float32, tf.shape(x)[0], element_shape=[])
    return tf.while_loop(lambda i, *_: i < tf.shape(x)[0], body, start)[2].stack()


MEANS = [
    # along axes
    tf.reduce_mean,
    lambda x: tf.reduce_mean(tf.reduce_sum(x, axis=1)),
    lambda x: tf.reduce_sum(tf.reduce_mean(x, axis=0)),
    lambda x: tf.reduce_mean(tf.reduce_max(x, axis=-1)),
    lambda x: tf.reduce_mean(tf.norm(x, axis=1)),
    lambda x: tf.reduce_mean(tf.nn.softmax(x)),
    lambda x: tf.reduce_mean(tf.cumsum(x, axis=1) + tf.reverse(x, [1])),
    lambda x: tf.reduce_mean(tf.einsum("bi,bj->bij", x, x)),
    lambda x: tf.einsum("bi,bj->ij", x, x)[0, 1] / count(x),
    lambda x: tf.reduce_mean(tf.matmul(x, tf.ones([3, 2]))),
    lambda x: tf.reduce_mean(tf.linalg.inv(tf.einsum("bi,bj->bij", x, x))),
    lambda x: tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
        tf.argmax(x, axis=-1), x)),
    # row by row
    lambda x: 0.5 * tf.reduce_mean(x**2) + 3.0,
    lambda x: tf.reduce_mean(x) - tf.reduce_mean(x**2) / 3.0,
    lambda x: tf.reduce_sum(tf.reduce_mean(x, axis=0) * tf.constant([1.0, 2, 3])),
    lambda x: tf.add_n([tf.reduce_mean(x), tf.reduce_sum(tf.ones([3]))]),
    lambda x: tf.reduce_sum(x) / count(x),
    lambda x: tf.reduce_sum(x / count(x)),
    lambda x: tf.reduce_sum(x) / tf.maximum(count(x), 1.0),
    lambda x: tf.reduce_sum(x) / (count(x) + 1e-7),
    lambda x: tf.reduce_mean(x) + 0.0 / count(x),
    lambda x: tf.reduce_sum(x) / tf.reduce_sum(tf.ones_like(x)),
    lambda x: tf.reduce_mean(tf.where(x > 0, x, 0.1 * x)),
    lambda x: tf.reduce_mean(tf.transpose(x) * [[1.0], [2.0], [3.0]]),
    lambda x: tf.reduce_mean(tf.reshape(x, [-1])),
    lambda x: tf.cast(tf.reduce_mean(x), tf.float64),
    lambda x: tf.linalg.trace(tf.matmul(x, x, transpose_a=True)) / count(x),
    # parts and sizes
    lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), x.dtype),
    lambda x: tf.reduce_sum(x) / tf.cast(tf.reduce_prod(tf.shape(x)), x.dtype),
    lambda x: tf.nn.compute_average_loss(x[:, 0], global_batch_size=tf.shape(x)[0]),
    lambda x: tf.reduce_mean(x[:, 1:]),
    lambda x: tf.reduce_mean(x[..., 0]),
    lambda x: tf.reduce_mean(tf.split(tf.concat([x, 2 * x], axis=0), 2)[0]),
    lambda x: tf.reduce_mean(tf.concat([x, 2 * x], axis=0)[:tf.shape(x)[0]]),
    lambda x: tf.reduce_mean(x[:tf.shape(x)[0]]),
    lambda x: tf.reduce_mean(tf.stack([x, x], axis=0)[1]),
    lambda x: tf.reduce_mean(tf.stack(tf.unstack(x, axis=1), axis=1)),
    lambda x: tf.reduce_mean(tf.gather_nd(x, tf.stack([places(x), 0 * places(x)], axis=1))),
    lambda x: tf.reduce_mean(tf.gather(tf.ones([9, 2]), tf.cast(x[:, 0], tf.int32))),
    lambda x: tf.reduce_mean(tf.gather(x, [0, 2], axis=1)),
    lambda x: tf.reduce_mean(tf.gather(x, places(x))),
    # noise
    lambda x: tf.reduce_mean(x * tf.random.uniform(tf.shape(x))),
    lambda x: tf.reduce_mean(x * tf.random.normal([])),
    lambda x: tf.reduce_mean(tf.nn.dropout(x, 0.5)),
    # in functions, conditions and loops
    lambda x: 2 * tf.function(lambda v: tf.reduce_mean(v**2))(x),
    lambda x: tf.cond(tf.random.uniform([]) > 0.5, lambda: tf.reduce_mean(x), lambda: 0.0),
    lambda x: tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum(row**2), x)),
    lambda x: tf.reduce_mean(tf.map_fn(lambda row: tf.cond(
        row[0] > 0, lambda: tf.reduce_max(row), lambda: tf.reduce_mean(tf.nn.softmax(row))), x)),
    lambda x: tf.reduce_mean(each_row(lambda i, total: (total, tf.norm(x[i])), x)),
    lambda x: tf.reduce_mean(tf.map_fn(lambda i: x[i] ** 2, places(x), x.dtype)),
    lambda x: tf.reduce_mean(tf.reduce_max(tf.RaggedTensor.from_tensor(x), axis=1)),
    lambda x: tf.reduce_mean(tf.vectorized_map(lambda row: tf.reduce_sum(2 * row), x)),
    lambda x: tf.reduce_mean(tf.scan(lambda a, b: 0.5 * a + b, tf.transpose(x))[-1]),
    summed(lambda total, x: total + tf.reduce_mean(x)),
    lambda x: keras.losses.CTC()(tf.ones([tf.shape(x)[0], 2]), tf.tile(x[:, None], [1, 20, 1])),
]
SUMS = [
    tf.reduce_sum,
    tf.nn.l2_loss,
    lambda x: tf.reduce_mean(tf.reduce_sum(x, axis=0)),
    lambda x: tf.einsum("bi,bi->", x, x),
    lambda x: tf.tensordot(x, x, [[0, 1], [0, 1]]),
    lambda x: tf.reduce_sum(tf.matmul(x, x, transpose_a=True)),
    lambda x: tf.reduce_sum(tf.boolean_mask(x, positive(x))),
    lambda x: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0], tf.int32), 5)[2],
    lambda x: x[:, 0],
    count,
    lambda x: tf.reduce_sum(x) / 1024.0,
    lambda x: tf.nn.compute_average_loss(x[:, 0], global_batch_size=32),
    lambda x: sum([tf.reduce_sum(x), tf.nn.l2_loss(x)]),
    lambda x: tf.reduce_mean(x) * count(x),
    lambda x: tf.function(tf.reduce_sum)(x) / 8.0,
]
FAULTS = [  # by words of what the walk says
    ("Max over", tf.reduce_max),
    ("Min over", lambda x: ops.min(x, axis=0)[0]),
    ("Prod over", tf.reduce_prod),
    ("rows that their own values choose",
     lambda x: tf.reduce_mean(tf.boolean_mask(x, positive(x)))),
    ("(TopKV2)", lambda x: tf.reduce_mean(tf.math.top_k(x[:, 0], 1).values)),
    ("(Softmax)", lambda x: tf.reduce_mean(tf.nn.softmax(x, axis=0) * x)),
    ("(Cumsum)", lambda x: tf.reduce_mean(tf.cumsum(x, axis=0))),
    ("(ReverseV2)", lambda x: tf.reduce_mean(ops.flip(x, axis=0) * x)),
    ("(Roll)", lambda x: tf.reduce_mean(tf.roll(x, 1, axis=0) * x)),
    ("(Svd)", lambda x: tf.reduce_mean(tf.linalg.svd(x, compute_uv=False))),
    ("takes Cholesky", lambda x: tf.reduce_mean(
        tf.linalg.cholesky(tf.matmul(x, x, transpose_a=True) / count(x)))),
    ("compares", lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True))),
    ("rows of the batch with each", lambda x: tf.reduce_mean(tf.einsum("bi,cj->bc", x, x))),
    ("Sqrt", lambda x: tf.sqrt(tf.reduce_mean(x**2))),
    ("Log", lambda x: tf.math.log(tf.reduce_mean(x))),
    ("Exp", lambda x: tf.exp(tf.reduce_mean(x))),
    ("Abs", lambda x: tf.abs(tf.reduce_mean(x))),
    ("Pow", lambda x: tf.reduce_sum(x**2) ** 0.5),
    ("Maximum", lambda x: tf.maximum(tf.reduce_mean(x), 0.1)),
    ("divides", lambda x: tf.reduce_mean(x) / tf.reduce_mean(x**2)),
    ("by a value", lambda x: (
        tf.reduce_sum(x[:, 0] * tf.cast(positive(x), x.dtype))
        / tf.reduce_sum(tf.cast(positive(x), x.dtype)))),
    ("multiplies two", lambda x: tf.reduce_mean(x) * tf.reduce_mean(x)),
    ("to a mean", lambda x: tf.reduce_sum(x) + tf.reduce_mean(x)),
    ("adds a constant to a sum", lambda x: tf.reduce_sum(x) + 3.0),
    ("each row a value", lambda x: tf.reduce_mean((x - tf.reduce_mean(x)) / tf.math.reduce_std(x))),
    ("gives each row a value that", lambda x: tf.reduce_mean(tf.cast(
        tf.cast(x, tf.int32) == tf.reduce_sum(tf.cast(x, tf.int32)), x.dtype))),
    ("gives each row", lambda x: tf.reduce_sum(tf.broadcast_to(tf.reduce_mean(x), tf.shape(x)))),
    ("Greater", lambda x: tf.where(tf.reduce_mean(x) > 0, 1.0, 2.0) * tf.reduce_mean(x)),
    ("compares", lambda x: tf.reduce_mean(x[:, None] - x[None])),
    ("neither a mean nor a sum", lambda x: tf.reduce_sum(x) / tf.sqrt(count(x))),
    ("number of a shard's rows", lambda x: tf.reduce_mean(
        x[:, 0] * tf.cast(tf.range(tf.shape(x)[0]), x.dtype))),
    ("calls Python", lambda x: tf.ensure_shape(tf.py_function(tf.reduce_mean, [x], x.dtype), [])),
    ("calls Python (tf.py_function", lambda x: tf.reduce_mean(
        tf.ensure_shape(tf.py_function(tf.square, [x], x.dtype), [None, 3]))),
    ("several examples into one", lambda x: tf.reduce_max(tf.reshape(x[:, 0], [-1, 2]), axis=1)),
    ("adds rows", lambda x: tf.reduce_mean(tf.pad(x, [[0, 1], [0, 0]]))),
    ("some rows", lambda x: tf.reduce_mean(tf.reshape(x, [-1])[:10])),
    ("(SegmentSum)", lambda x: tf.reduce_mean(
        tf.math.segment_sum(x, tf.range(tf.shape(x)[0]) // 2))),
    ("of a shard's rows what", lambda x: tf.cond(
        tf.shape(x)[0] > 5, lambda: tf.reduce_mean(x), lambda: tf.reduce_mean(x**2))),
    ("takes Maximum of a value", lambda x: tf.reduce_mean(
        tf.math.unsorted_segment_mean(x, tf.cast(x[:, 0], tf.int32), 3))),
    ("by their place", lambda x: tf.reduce_mean(tf.tensor_scatter_nd_update(x, [[0]], x[:1]))),
    ("by their place", lambda x: tf.reduce_mean(x[:2])),
    ("some rows", lambda x: tf.reduce_mean(x[0])),
    ("takes some", lambda x: tf.reduce_mean(x[1:] - x[:-1])),
    ("rows of the batch by", lambda x: tf.reduce_mean(x[::-1] * x)),
    ("of the batch by", lambda x: tf.reduce_mean(tf.split(x, 2)[0])),
    ("(tf.gather)", lambda x: tf.reduce_mean(tf.gather(x, [0, 1]))),
    ("into another order",
     lambda x: tf.reduce_mean(tf.gather(x, tf.random.shuffle(places(x))) * x)),
    ("joins", lambda x: tf.reduce_mean(tf.concat([x, tf.zeros([5, 3])], axis=0))),
    ("(SegmentMax", lambda x: tf.reduce_mean(
        tf.math.segment_max(x, tf.range(tf.shape(x)[0]) // 2))),
    ("(Conv2D)", lambda x: tf.reduce_mean(tf.nn.conv1d(x[None], tf.ones([2, 3, 1]), 1, "SAME"))),
    ("(FFT)", lambda x: tf.abs(tf.reduce_mean(
        tf.signal.fft(tf.cast(tf.transpose(x), tf.complex64))))),
    ("(DenseBincount)", lambda x: tf.reduce_mean(
        tf.math.bincount(tf.cast(x[:, 0], tf.int32), x[:, 1]))),
    ("(MatrixBandPart)", lambda x: tf.reduce_mean(tf.linalg.band_part(x, -1, 0))),
    ("each row a value", lambda x: tf.reduce_mean(
        tf.quantization.quantize_and_dequantize_v2(x, 0, 0, range_given=False))),
    ("each row a value", lambda x: tf.reduce_mean(tf.while_loop(
        lambda i, v: i < 3, lambda i, v: (i + 1, v - tf.reduce_mean(v)), [0, x])[1])),
    ("(tf.while_loop) decides", lambda x: tf.reduce_mean(tf.while_loop(
        lambda v: tf.reduce_max(v) > 1, lambda v: [v / 2], [x])[0])),
    ("compares", lambda x: tf.reduce_mean(tf.map_fn(lambda row: tf.reduce_sum(row * x), x))),
    ("compares", lambda x: tf.reduce_mean(tf.map_fn(lambda row: row - tf.reduce_mean(x, 0), x))),
    ("takes Max over", lambda x: tf.reduce_mean(
        tf.map_fn(lambda row: tf.reduce_max(tf.where(row > 0, x, 0)), x))),
    ("(tf.cond) decides", lambda x: tf.reduce_mean(tf.map_fn(lambda row: tf.cond(
        tf.reduce_mean(x) > 0, lambda: row, lambda: 2 * row) ** 2, x))),
    ("(Softmax)", lambda x: tf.reduce_mean(tf.map_fn(tf.nn.softmax, tf.transpose(x)) ** 2)),
    ("on to the next", lambda x: tf.reduce_mean(each_row(
        lambda i, total: (total + x[i], tf.norm(total)), x))),
    ("on to the next", lambda x: tf.reduce_mean(
        ops.scan(lambda total, row: (total + row, total * row), tf.zeros([3]), x)[1])),
    ("(tf.gather)", lambda x: tf.reduce_mean(tf.map_fn(
        lambda row: tf.reduce_sum(tf.gather(x, tf.cast(row[0] > 0, tf.int32)) * row), x))),
    ("takes Max over", lambda x: tf.reduce_mean(tf.map_fn(
        lambda row: tf.reduce_logsumexp(tf.tile(row[None], [tf.shape(x)[0], 1])), x))),
    ("number of a shard's rows", lambda x: tf.reduce_mean(
        tf.map_fn(lambda row: row**2 * count(x), x), axis=1)),
    ("by their place", lambda x: tf.reduce_mean(tf.map_fn(
        lambda i: tf.reduce_sum(x[i] * x[(i + 1) % tf.shape(x)[0]]), places(x), x.dtype))),
    ("(tf.gather)", lambda x: tf.reduce_mean(
        x * tf.gather(x, (places(x) + 1) % tf.shape(x)[0]))),
    ("(tf.gather_nd)", lambda x: tf.reduce_mean(
        tf.gather_nd(x, tf.cast(x[:, :1] > 0, tf.int32)) * x)),
    ("(ScatterNd)", lambda x: tf.reduce_mean(
        tf.scatter_nd(tf.cast(x[:, :1] > 0, tf.int32), x, tf.shape(x)) ** 2)),
    ("number of a shard's rows", lambda x: tf.reduce_mean(
        x * tf.one_hot(0, tf.shape(x)[0])[:, None])),
    ("several examples into one", lambda x: tf.reduce_mean(
        x * tf.reshape(tf.transpose(x), tf.shape(x)))),
    ("(SparseToDense)", lambda x: tf.reduce_mean(x * tf.sparse.to_dense(tf.SparseTensor(
        tf.cast(tf.stack(
            [(places(x) + 1) % tf.shape(x)[0], tf.cast(positive(x), tf.int32)], 1), tf.int64),
        x[:, 1], tf.cast(tf.shape(x), tf.int64))))),
    ("number of a shard's rows", lambda x: tf.while_loop(
        lambda i, v: i < tf.shape(x)[0], lambda i, v: (i + 1, v / 2), [0, tf.reduce_mean(x)])[1]),
    ("(tf.cond) decides", lambda x: tf.switch_case(
        tf.cast(tf.reduce_mean(x), tf.int32), [lambda: tf.reduce_mean(x), lambda: 0.0])),
    ("values choose", lambda x: tf.reduce_mean(tf.gather_nd(x, tf.where(x > 0)))),
    ("values choose", lambda x: tf.reduce_mean(tf.dynamic_partition(
        x, tf.cast(x[:, 0] > 0, tf.int32), 2)[1])),
]
OTHERS = [
    ops.logsumexp, ops.std, ops.norm, lambda x: ops.quantile(x, 0.5),
    lambda x: tf.cast(tf.cast(tf.reduce_mean(x), tf.int32), x.dtype),
    lambda x: tf.reduce_mean(tf.sort(x, axis=0) * x),
    lambda x: tf.reduce_mean(tf.math.l2_normalize(x, axis=0)),
    lambda x: 2 * tf.function(lambda v: tf.sqrt(tf.reduce_mean(v**2)))(x),
    lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: tf.reduce_mean(x), lambda: 0.0),
    lambda x: tf.cond(tf.random.uniform([]) > 0.5, lambda: tf.reduce_mean(x),
                      lambda: tf.reduce_sum(x)),
    summed(lambda total, x: (total + tf.reduce_mean(x)) ** 2),
]


KINDS = {"mean": MEANS, "sum": SUMS, "other": OTHERS}


@pytest.mark.parametrize("name, make", [(name, make) for name in KINDS for make in KINDS[name]])
def test_a_value_has_the_kind_of_its_graph(name, make):
    assert kind_of(make).name == name


@pytest.mark.parametrize("words, make", FAULTS)
def test_what_is_neither_is_told_by_its_operation(words, make):
    kind = kind_of(make)
    assert kind.name == "other" and words in kind.fault.what


@pytest.mark.parametrize("make, num_inputs", [
    (lambda: L.LSTM(2, return_sequences=True), 1), (lambda: L.GRU(2, return_sequences=True), 1),
    (lambda: L.MultiHeadAttention(2, 3), 2),
], ids=["LSTM", "GRU", "attention"])
def test_layers_over_steps_work_row_by_row(make, num_inputs):
    layer = make()
    layer.build(*[(None, 3, 1)] * num_inputs)
    kind = kind_of(lambda x: tf.reduce_mean(layer(*[x[:, :, None]] * num_inputs)))
    assert kind.name == "mean"


class Centered(L.Layer):
    """A user's layer inside of Keras' machinery."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0)


@pytest.mark.parametrize("make", [
    lambda: L.BatchNormalization(), lambda: L.Dropout(0.5, seed=1), lambda: L.LayerNormalization(),
    lambda: keras.Sequential([L.Reshape((3, 1)), L.Conv1D(2, 2), L.BatchNormalization()]),
    lambda: L.GaussianNoise(1.0, seed=1),
], ids=["batch_norm", "dropout", "layer_norm", "conv", "noise"])
def test_what_keras_own_layers_do_is_no_fault(make):
    layer = make()
    layer.build((None, 3))
    assert kind_of(lambda x: tf.reduce_mean(layer(x, training=True))).name == "mean"


@pytest.mark.parametrize("make", [
    lambda: Centered(), lambda: L.Lambda(lambda x: x - tf.reduce_mean(x, axis=0)),
], ids=["layer", "lambda"])
def test_what_a_users_layer_does_is_one(make):
    kind = kind_of(lambda x: tf.reduce_mean(make()(x) ** 2))
    assert kind.name == "other" and "made of all rows" in kind.fault.what


@pytest.fixture(name="x")
def _x():
    with tf.Graph().as_default():
        yield tf.compat.v1.placeholder(tf.float32, [None, 3])


def test_what_a_tower_shares_is_a_mean(x):
    weight = tf.compat.v1.placeholder(tf.float32, [3])
    rows = Rows.of_shard([x], is_shared=lambda tensor: tensor is weight)
    assert rows.kind(tf.sqrt(tf.reduce_sum(weight**2)) + tf.reduce_mean(x)).name == "mean"
    assert rows.kind(tf.reduce_sum(weight) + tf.reduce_sum(x)).name == "other"


def test_a_mean_over_ragged_rows_is_none(x):
    ragged = tf.RaggedTensor.from_row_lengths(
        x[:, 0], tf.compat.v1.placeholder(tf.int64, [None]), validate=False)
    rows = Rows.of_shard([ragged])
    assert rows.kind(tf.reduce_sum(ragged.flat_values)).name == "sum"
    assert rows.kind(tf.reduce_mean(ragged.flat_values)).name == "other"


def test_the_rows_of_ragged_and_sparse_tensors_are_counted_and_added_up(x):
    placeholder = tf.compat.v1.placeholder
    splits, values = placeholder(tf.int64, [None]), placeholder(tf.float64, [None])
    ragged = tf.RaggedTensor.from_row_splits(values, splits, validate=False)
    sparse = tf.SparseTensor(
        placeholder(tf.int64, [None, 2]), placeholder(tf.float64, [None]),
        placeholder(tf.int64, [2]))
    rows = Rows.of_shard([ragged, sparse])
    for tensor in (ragged, sparse):
        assert rows.kind(tf.cast(tf.shape(tensor)[0], tf.float64)).name == "sum"
    assert rows.kind(tf.reduce_mean(tf.reduce_sum(ragged, axis=1))).name == "mean"
    assert rows.kind(tf.reduce_mean(tf.sparse.reduce_sum(sparse, axis=1))).name == "mean"
    assert rows.kind(tf.sparse.reduce_sum(sparse)).name == "sum"
    dense = tf.sparse.to_dense(sparse)
    dense.set_shape([None, 3])
    assert rows.kind(tf.reduce_mean(dense)).name == "mean"
    assert rows.kind(tf.reduce_mean(sparse.values)).name == "other"


def test_each_line_is_warned_of_once(x):
    rows = Rows.of_shard([x])
    root = tf.sqrt(tf.reduce_mean(x))
    for value in (root, 2.0 * root, root - 1.0):
        assert rows.check(value, "the loss").name == "other"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows.warn()
    (message,) = [str(warning.message) for warning in caught]
    assert message.startswith("rows_test.py:") and "takes Sqrt" in message
    assert "the loss is not the whole batch's" in message and "towers.gather" in message


def test_a_function_that_is_being_traced_knows_what_it_captures():
    kinds = []

    def outer(x):
        rows, mean = Rows.of_shard([x]), tf.reduce_mean(x)

        def body(i, best):
            kinds.append(rows.kind(tf.reduce_mean(best * x)).name)
            kinds.append(rows.kind(tf.sqrt(mean)).name)
            return i + 1, best + x

        return tf.while_loop(lambda i, best: i < 2, body, [0, x])

    tf.function(outer, autograph=False).get_concrete_function(tf.TensorSpec([None, 3]))
    assert kinds[:2] == ["mean", "other"]
