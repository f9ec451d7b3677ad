"""What drawn programs are made of: blocks from rows x 4 to rows x 4, losses, metrics and steps."""

import keras
import tensorflow as tf

L, R = keras.layers, tf.raw_ops


def count(x: tf.Tensor) -> tf.Tensor:
    """The number of rows, as a float."""
    return tf.cast(tf.shape(x)[0], x.dtype)


def similarities(x: tf.Tensor) -> tf.Tensor:
    z = x / (1 + tf.norm(x + 1e-3, axis=1, keepdims=True))
    return tf.matmul(z, z, transpose_b=True)


def nearest(x: tf.Tensor) -> tf.Tensor:
    """Adds, to each row, the row that is most similar to it, itself excepted."""
    others = tf.linalg.set_diag(similarities(x), -9 * tf.ones_like(x[:, 0]))
    return x + 0.3 * tf.gather(x, tf.argmax(others, 1))


def neighbours(x: tf.Tensor) -> tf.Tensor:
    """A layer of a graph whose nodes are the rows."""
    edges = tf.sigmoid(similarities(x))
    return tf.matmul(edges, x) / tf.reduce_sum(edges, 1, keepdims=True)


def grouped(x: tf.Tensor) -> tf.Tensor:
    """Averages the rows of each group, and gives the average to its rows."""
    group = tf.cast(x[:, 0] > 0, tf.int32) + 2 * tf.cast(x[:, 1] > 0, tf.int32)
    return x + tf.gather(tf.math.unsorted_segment_mean(x, group, 4), group)


def halves(x: tf.Tensor) -> tf.Tensor:
    half = tf.shape(x)[0] // 2
    return tf.concat([x[half:], x[:half]], 0)


def loop(x: tf.Tensor) -> tf.Tensor:
    _, x = tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, x + tf.sin(x) / 3), (0, x))
    return x


def loop_with_means(x: tf.Tensor) -> tf.Tensor:
    body = lambda i, x: (i + 1, x - tf.reduce_mean(x, 0) / 3)  # noqa: E731
    return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]


def scanned(x: tf.Tensor) -> tf.Tensor:
    """Carries a state over the columns."""
    states = tf.scan(lambda s, column: tf.tanh(s + column), tf.transpose(x), tf.zeros_like(x[:, 0]))
    return tf.transpose(states)


def tridiagonal(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
    """Solves one system of equations for all rows."""
    diagonals = tf.stack([w[0], w[1] + 9, w[2]])
    return x + tf.transpose(tf.linalg.tridiagonal_solve(diagonals, tf.transpose(x)))


def in_pairs(x: tf.Tensor) -> tf.Tensor:
    """Takes the even part of the rows in pairs; a last row is alone."""
    even = tf.shape(x)[0] // 2 * 2
    pairs = tf.reshape(x[:even], [-1, 2, 4])
    return tf.concat([tf.reshape(pairs - tf.reduce_mean(pairs, 1, True), [-1, 4]), x[even:]], 0)


# Of rows x and a matrix w. Both branches read w: run eagerly, Keras leaves out what is not read.
BLOCKS = {
    "product": lambda x, w: tf.tanh(x @ w),
    "softmax": lambda x, w: tf.nn.softmax(x @ w),
    "softmax over rows": lambda x, w: tf.nn.softmax(x @ w, 0) * count(x),
    "standardized": lambda x, w: (x - tf.reduce_mean(x, 0)) / (0.5 + tf.math.reduce_std(x, 0)),
    "divided by the number": lambda x, w: x / count(x) + x,
    "of few": lambda x, w: x / tf.cast(tf.minimum(tf.shape(x)[0], 5), x.dtype),
    "if few": lambda x, w: tf.cond(tf.shape(x)[0] > 4, lambda: tf.sin(x + 0 * w[0]), lambda: x @ w),
    # Normalized rows add up to 0 but for rounding: a limit of 0 would be a matter of rounding.
    "if large": lambda x, w: tf.cond(
        tf.reduce_sum(x) > 0.1, lambda: tf.sin(x + 0 * w[0]), lambda: x @ w
    ),
    "if some are large": lambda x, w: tf.where(x > tf.reduce_mean(x), x, tf.sin(x @ w)),
    "first": lambda x, w: x + x[:1] + tf.reduce_max(x, 0),
    "first five": lambda x, w: x * tf.reduce_mean(x[:5], 0),  # a batch may have fewer
    "anchors": lambda x, w: tf.nn.softmax(tf.matmul(x @ w, x[:5], transpose_b=True)) @ x[:5],
    "padded to eight": lambda x, w: x / tf.reduce_mean(
        tf.concat([tf.exp(x), tf.ones([8, 4], x.dtype)[tf.shape(x)[0] :]], 0)
    ),
    "reversed": lambda x, w: 0.3 * x + 0.7 * tf.reverse(x, [0]),
    "rolled": lambda x, w: x - tf.roll(x, 1, 0) @ w,
    "halves": lambda x, w: halves(x),
    "in pairs": lambda x, w: in_pairs(x),
    "sorted": lambda x, w: tf.sort(x, 0),
    "by order": lambda x, w: tf.gather(x, tf.argsort(x[:, 0])),
    "cumulated": lambda x, w: tf.cumsum(x, 0) / count(x),
    "cumulated columns": lambda x, w: tf.cumsum(x, 1),
    "repeated": lambda x, w: tf.repeat(x, 2, axis=0)[: tf.shape(x)[0]],
    "tiled": lambda x, w: tf.reduce_mean(tf.reshape(tf.tile(x, [1, 3]), [-1, 3, 4]), 1),
    "nearest": lambda x, w: nearest(x),
    "neighbours": lambda x, w: neighbours(x) @ w,
    "grouped": lambda x, w: grouped(x),
    "whitened": lambda x, w: x @ tf.linalg.inv(
        tf.matmul(x, x, transpose_a=True) / count(x) + 2 * tf.eye(4, dtype=x.dtype)
    ),
    "looked up": lambda x, w: tf.gather(w, tf.cast(x[:, 0] > 0, tf.int32)) + x,
    "chosen": lambda x, w: x * tf.gather(x, tf.cast(x[:, :1] > 0, tf.int32), axis=1, batch_dims=1),
    "scattered": lambda x, w: x + tf.scatter_nd(tf.cast(x[:, :1] > 0, tf.int32), x, [4, 4])[:1],
    "clipped": lambda x, w: tf.clip_by_norm(x, 1.5) + tf.clip_by_norm(x, 0.5, axes=[1]),
    "noise": lambda x, w: x + tf.random.stateless_normal(tf.shape(x), [1, 2], dtype=x.dtype),
    "drawn columns": lambda x, w: x * tf.random.stateless_uniform([4], [1, 2], dtype=x.dtype),
    "shuffled": lambda x, w: tf.gather(
        x, tf.argsort(tf.random.stateless_uniform([tf.shape(x)[0]], [1, 2]))
    ),
    "loop": lambda x, w: loop(x),
    "loop with means": lambda x, w: loop_with_means(x),
    "scanned": lambda x, w: scanned(x),
    "scanned over rows": lambda x, w: tf.scan(lambda s, row: 0.5 * s + row, x),
    "mapped": lambda x, w: tf.map_fn(lambda row: tf.linalg.matvec(w, row), x),
    "einsum": lambda x, w: tf.einsum("ni,ij,mj->nj", x, w, tf.tanh(x)) / count(x),
    "tridiagonal": lambda x, w: tridiagonal(x, w),
    "stopped": lambda x, w: x - tf.stop_gradient(tf.reduce_mean(x, 0, keepdims=True)),
    "python": lambda x, w: x + tf.stop_gradient(tf.ensure_shape(
        tf.numpy_function(lambda v: v - v.mean(0), [x], x.dtype), [None, 4]
    )),
}  # fmt: skip


class Block(keras.Layer):
    """Calls one of the blocks with a weight of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.block = BLOCKS[name]

    def build(self, shape: tuple) -> None:
        self.w = self.add_weight(shape=(4, 4))

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(self.block(x, self.w), [None, 4])

    def compute_output_shape(self, shape: tuple) -> tuple:
        return shape


def over_columns(make) -> list:
    """Layers that take the four numbers of a row for two steps of two."""
    return [L.Reshape((2, 2)), make(), L.Reshape((4,))]


LAYERS = {
    "dense": lambda: [L.Dense(4, "relu", kernel_regularizer="l2")],
    "normalized": lambda: [L.BatchNormalization()],
    "normalized rows": lambda: [L.LayerNormalization()],
    "dropout": lambda: [L.Dropout(0.4, seed=3)],
    "gaussian": lambda: [L.GaussianNoise(0.3, seed=4)],
    "activity": lambda: [L.ActivityRegularization(l2=0.1)],
    "unit": lambda: [L.UnitNormalization()],
    "gru": lambda: over_columns(lambda: L.GRU(2, return_sequences=True)),
    "lstm": lambda: over_columns(
        lambda: L.Bidirectional(L.LSTM(1, dropout=0.2, return_sequences=True))
    ),
    "convolution": lambda: over_columns(lambda: L.Conv1D(2, 2, padding="same")),
    "pooling": lambda: over_columns(lambda: L.MaxPooling1D(2, 1, padding="same")),
}


def pull_apart(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """Contrasts each row with all others."""
    scores = similarities(z) * 3
    return keras.losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(z)[0]), scores, from_logits=True
    )


def dice(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    p = tf.sigmoid(z)
    return 1 - (2 * tf.reduce_sum(p * y) + 1) / (tf.reduce_sum(p) + tf.reduce_sum(y) + 1)


def hardest(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """The mean of the largest half of the errors."""
    errors = tf.reduce_mean((y - z) ** 2, 1)
    return tf.reduce_mean(tf.math.top_k(errors, (tf.shape(z)[0] + 1) // 2).values)


def known(y: tf.Tensor, z: tf.Tensor) -> tf.Tensor:
    """The mean error where the target is positive."""
    weight = tf.cast(y > 0.3, z.dtype)
    return tf.math.divide_no_nan(tf.reduce_sum(weight * (y - z) ** 2), tf.reduce_sum(weight))


_OF_ROWS = ("mse", "mae", "huber", "log_cosh", "hinge", "squared_hinge", "categorical_hinge",
            "cosine_similarity", "msle", "kl_divergence", "poisson")  # fmt: skip
LOSSES = {
    **{name: lambda name=name: keras.losses.get(name) for name in _OF_ROWS},
    "softmax": lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
    "sigmoid": lambda: keras.losses.BinaryCrossentropy(from_logits=True),
    "focal": lambda: keras.losses.BinaryFocalCrossentropy(from_logits=True),
    "sum": lambda: keras.losses.MeanSquaredError(reduction="sum"),
    "pull apart": lambda: pull_apart,
    "dice": lambda: dice,
    "hardest": lambda: hardest,
    "known": lambda: known,
}
METRICS = {
    "none": lambda: [],
    "errors": lambda: ["mae", keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()],
    "classes": lambda: ["categorical_accuracy", keras.metrics.OneHotMeanIoU(3)],
    "curves": lambda: [keras.metrics.AUC(from_logits=True), keras.metrics.Precision()],
}


class Taped(keras.Model):
    """Adds the loss to the squares of its gradient with respect to x."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                z = self(x, training=True)
                loss = self.compute_loss(x, y, z, weight)
            slope = tf.convert_to_tensor(inner.gradient(loss, x))
            loss += 0.1 * tf.reduce_sum(slope**2)
        weights = self.trainable_variables
        gradients, norm = tf.clip_by_global_norm(outer.gradient(loss, weights), 2.0)
        self.optimizer.apply_gradients(zip(gradients, weights))
        return {"loss": loss, "norm": norm}


class Mixed(keras.Model):
    """Mixes each row with another one, as MixUp does."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        x, y = (0.7 * v + 0.3 * tf.reverse(v, [0]) for v in (x, y))
        return super().train_step((x, y, weight))


class Twice(keras.Model):
    """Updates once for the rows and once for the largest half of them."""

    def train_step(self, data):
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        logs = {}
        for name, part in (("all", slice(None)), ("half", slice(tf.shape(x)[0] // 2, None))):
            with tf.GradientTape() as tape:
                logs[name] = tf.reduce_mean((self(x[part], training=True) - y[part]) ** 2)
            gradients = tape.gradient(logs[name], self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        return logs


STEPS = {"keras": keras.Model, "taped": Taped, "mixed": Mixed, "twice": Twice}
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0),
    "adam": lambda: keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=1.0),
    "accumulated": lambda: keras.optimizers.SGD(0.05, gradient_accumulation_steps=2),
    "averaged": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-2, use_ema=True),
}
