"""Variables while a step is traced: what towers assign becomes one value."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import fit, fit_alike, mean_square, model_with, pairs, update


def updating(metric):
    def step(model, data):
        metric.update_state(data[0])
        return {"result": metric.result()}

    return model_with(step)


class Largest(keras.metrics.Metric):
    """No sum: the largest value so far, of the rows of all towers."""

    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, values):
        self.value.assign(tf.maximum(self.value, tf.reduce_max(towers.gather(values))))

    def result(self):
        return self.value


class Batches(keras.metrics.Metric):
    """What a function makes of each batch, averaged over the batches."""

    def __init__(self, function):
        super().__init__(name="batches")
        self.function = function
        self.total = self.add_variable((), "zeros", name="total")
        self.count = self.add_variable((), "zeros", name="count")

    def update_state(self, values):
        self.total.assign_add(self.function(values))
        self.count.assign_add(1.0)

    def result(self):
        return self.total / self.count


def test_state_and_metrics_of_gathered_rows_and_of_means_and_sums_are_kerass_own(float64):
    def make():
        seen = keras.Variable("zeros", shape=(4,), trainable=False, name="seen")
        metrics = Largest(), Batches(tf.reduce_mean), Batches(tf.reduce_sum)

        def step(model, data):
            seen.assign(tf.reduce_max(towers.gather(data[0]), axis=0))
            for metric in metrics:
                metric.update_state(data[0])
            largest, mean, total = [metric.result() for metric in metrics]
            return {"seen": tf.reduce_sum(seen), "largest": largest, "mean": mean, "sum": total}

        return model_with(step)

    fit_alike(make, num_towers=5, batch_size=8)  # uneven shards; then of 3 rows, empty ones


def test_a_metric_that_adds_what_is_neither_is_warned_of():
    model = updating(Batches(tf.reduce_max))
    with pytest.warns(UserWarning, match="takes Max .* variable 'batches/total'.*gather"):
        fit(towers.make_parallel(model, 2))


def test_metrics_are_read_and_updated_in_any_order(float64):
    def make():
        mean, area = keras.metrics.Mean(), keras.metrics.AUC(num_thresholds=7)

        def step(model, data):
            x, y = data
            mean.update_state(tf.reduce_mean(x))
            first = mean.result()
            mean.update_state(y[:, 0])
            mean.update_state(tf.reduce_mean(y), sample_weight=tf.shape(y)[0])
            mean.update_state(tf.reduce_sum(y), sample_weight=tf.reduce_sum(x**2))
            mean.update_state(5.0)
            area.update_state(y[:, 0] > 0, tf.nn.sigmoid(x[:, 0]))
            again = {"first": first, "mean": mean.result(), "area": area.result()}
            mean.reset_state()
            return {**again, "reset": mean.result()}

        return model_with(step)

    fit_alike(make, num_towers=7, batch_size=6)


@pytest.mark.telling("transposed")
@pytest.mark.parametrize("values", [lambda x: [x[:, 0]], tf.transpose], ids=["list", "transposed"])
def test_a_metric_counts_the_rows_along_any_axis(values, float64):
    def make():
        mean = keras.metrics.Mean()

        def step(model, data):
            mean.update_state(values(data[0]))
            return {"mean": mean.result()}

        return model_with(step)

    fit_alike(make, num_towers=3, batch_size=6)  # equal shards would not fail, and be wrong


def test_a_small_addition_to_a_large_metric_is_not_rounded_by_a_difference():
    """float32: of each tower's 1, (2**24 + 1) - 2**24 would leave 0."""
    total = keras.metrics.Sum()
    total.total.assign(2.0**24)
    x, y = pairs(16)
    model = towers.make_parallel(updating(total), 2, num_towers=2)
    assert fit(model, np.full_like(x, 0.03125), y, batch_size=16)["result"] == [2.0**24 + 2]


def test_a_value_that_is_read_back_has_no_gradient(float64):
    """As in Keras: a metric or a state is a number, whatever it was computed of."""
    def make():
        mean = keras.metrics.Mean(dtype="float64")
        seen = keras.Variable(0.0, trainable=False, dtype="float64")

        def step(model, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = mean_square(model, x, y)
                mean.update_state(loss)
                seen.assign(tf.reduce_sum(model.trainable_weights[0] ** 2))
                loss = loss * mean.result() * (1.0 + seen)
            update(model, tape, loss)
            return {"loss": loss}

        model = model_with(step)
        model.compile(optimizer=keras.optimizers.SGD(1e-3), jit_compile=False)
        return model

    fit_alike(make, batch_size=4)


def test_parameters_assigned_in_the_step_count_and_keep_their_gradient(float64):
    def step(model, data):
        x, y = data
        weights = model.trainable_weights
        for weight in weights:
            weight.assign(0.5 * weight + 0.1)
        with tf.GradientTape() as tape:
            loss = mean_square(model, x, y)
        update(model, tape, loss)
        weights[0].assign(weights[0] * 0.9)
        return {"loss": loss, "norm": tf.norm(weights[0])}

    fit_alike(lambda: model_with(step), batch_size=4)


@pytest.mark.parametrize("batch_norm", ["average", "tower0"])
def test_batch_norm_statistics_become_one(batch_norm, float64):
    norm = keras.layers.BatchNormalization(momentum=0.0)
    norm.build((None, 4))

    class Normalizes(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def train_step(self, data):
            return {"loss": tf.reduce_mean(self.norm(data[0], training=True))}

    model = towers.make_parallel(Normalizes(), 2, num_towers=4, batch_norm=batch_norm)
    model.compile()
    x, y = pairs()
    fit(model, x, y)
    shards = np.split(x, [3, 6, 9])
    means = [shard.mean(axis=0) for shard in shards]
    expected = means[0] if batch_norm == "tower0" else np.average(
        means, axis=0, weights=[len(shard) for shard in shards])
    np.testing.assert_allclose(norm.moving_mean.numpy(), expected, rtol=1e-10)


def test_tf_variables_are_read_and_assigned_as_keras_variables_are(float64):
    """A codebook that is trained by hand, a count of steps, a queue of the rows of all towers."""
    def make():
        count = tf.Variable(0, name="count")
        codebook = tf.Variable(np.arange(6.0).reshape(3, 2), name="codebook")
        queue = tf.Variable(np.zeros((3, 4)), name="queue")
        usage = tf.Variable(
            0.0, dtype="float64", name="usage", aggregation=tf.VariableAggregation.MEAN)

        def step(model, data):
            x, y = data
            count.assign_add(1)
            queue.assign(towers.gather(x)[:3] + 0.1 * queue)
            usage.assign(0.5 * usage + tf.reduce_mean(x))
            with tf.GradientTape() as tape:
                near = tf.gather(codebook, tf.argmin(tf.abs(y), axis=1))
                loss = tf.reduce_mean((model(x) - near) ** 2)
            weights = [*model.trainable_weights, codebook]
            *gradients, last = tape.gradient(loss, weights)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_weights))
            codebook.assign_sub(0.1 * tf.convert_to_tensor(last))
            return {"loss": loss, "count": tf.cast(count, tf.float64), "usage": usage,
                    "queue": tf.reduce_sum(queue), "codebook": tf.reduce_sum(codebook)}

        return model_with(step)

    fit_alike(make, batch_size=4, eagerly=False)  # Keras would copy the variable that is returned


def test_a_tf_variable_of_a_shard_is_warned_of_by_name_and_line():
    largest = tf.Variable(0.0, name="largest")

    def step(model, data):
        largest.assign(tf.reduce_max(tf.cast(data[0], tf.float32)))
        return {"loss": tf.reduce_mean(data[0])}

    with pytest.warns(UserWarning, match="variables_test.py:.*'largest'.*towers.gather"):
        fit(towers.make_parallel(model_with(step), 2))
