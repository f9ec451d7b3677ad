"""The calls that are replaced while a step is traced, and what a custom step cannot do."""

import inspect
import threading
import warnings

import keras
import pytest
import tensorflow as tf

import towers
from tests.custom_step.steps import (
    fit, fit_alike, mean_square, model_with, refused, step_of, update,
)
from towers.machine.loss_internals import marked


def calls():
    optimizer, metric = keras.optimizers.Optimizer, keras.metrics.Mean
    return [tf.GradientTape.gradient, keras.losses.Loss.__call__, keras.layers.Layer.__call__,
            optimizer.apply, metric.update_state, keras.optimizers.LossScaleOptimizer.apply]


def test_nothing_stays_replaced():
    before = calls()
    own = [name for cls in keras.optimizers.Optimizer.__subclasses__() for name in vars(cls)]

    def step(model, data):
        raise RuntimeError("in the step")

    with pytest.raises(RuntimeError, match="in the step"):
        fit(towers.make_parallel(model_with(step), 2))
    assert calls() == before
    assert own == [n for cls in keras.optimizers.Optimizer.__subclasses__() for n in vars(cls)]


def test_another_thread_sees_the_calls_as_they_are():
    """While a step is traced, a metric elsewhere counts by itself."""
    other, found = keras.metrics.Mean(), []

    def update_elsewhere():
        other.update_state(4.0)
        variable = keras.Variable(3.0)
        with tf.GradientTape() as tape:
            square = variable * variable
        found.append(float(tape.gradient(square, variable)))

    def step(model, data):
        thread = threading.Thread(target=update_elsewhere)
        thread.start()
        thread.join()
        return {"loss": tf.reduce_mean(data[0])}

    fit(towers.make_parallel(model_with(step), 2))
    assert other.result() == 4.0 and other.count.numpy() == 1.0
    assert found == [6.0]


@pytest.mark.telling("mask")
@pytest.mark.parametrize("total", [
    tf.nn.l2_loss, lambda each: tf.reduce_sum(tf.boolean_mask(each**2, each[:, 0] > 0.0)),
], ids=["l2_loss", "mask"])
def test_a_sum_over_rows_counts_by_its_rows(total, float64):
    """In gradients, in logs and in means; with a ragged last batch, and with empty shards."""
    def make():
        tracker = keras.metrics.Mean(name="tracked")

        def step(model, data):
            x, y = data
            with tf.GradientTape() as tape:
                value = total(0.1 * (model(x) - y))
            update(model, tape, value)
            tracker.update_state(value)
            return {"value": value, "tracked": tracker.result()}

        return model_with(step)

    fit_alike(make, num_towers=5, batch_size=7)  # uneven and empty shards


def warnings_of(step, *data):
    """The messages of a fit on towers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(towers.make_parallel(model_with(step), 2), *data)
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


def test_each_line_that_makes_no_mean_is_warned_of_once():
    """Of what is returned, of what a metric is updated with, of what a gradient is taken of."""
    first = 0

    def step(model, data):
        nonlocal first
        x, y = data
        each = tf.reduce_mean((model(x) - y) ** 2, axis=1)
        mask = tf.cast(each > 1.0, each.dtype)
        tracker.update_state(each)
        first = inspect.currentframe().f_lineno + 1
        root = tf.sqrt(tf.reduce_mean(each))
        masked = tf.reduce_sum(each * mask) / tf.reduce_sum(mask)
        tracker.update_state(tf.reduce_max(each))
        mean = tf.reduce_mean(each)
        decided = tf.cond(mean > 1.0, lambda: mean, lambda: 2.0 * mean)
        with tf.GradientTape() as tape:
            each = tf.reduce_mean((model(x) - y) ** 2, axis=1)
            advantage = each - tf.reduce_mean(each)
        tape.gradient(advantage, model.trainable_weights)
        return {"root": root, "again": 2.0 * root, "masked": masked, "decided": decided,
                "fine": mean}

    tracker = keras.metrics.Mean()
    messages = warnings_of(step)
    lines = sorted(int(m.split(":")[1].split(" ")[0]) for m in messages)
    assert lines == [first + i for i in (0, 1, 2, 4, 7)], messages
    assert all(m.startswith("patches_test.py:") and "towers.gather" in m for m in messages)
    (masked,) = [m for m in messages if f":{first + 1} " in m]
    assert "tf.reduce_sum(towers.gather(values * mask)) / tf.reduce_sum(towers.gather(mask))" in (
        masked)


class Losses:
    """Keras losses that divide by something else than the number of examples."""

    def __init__(self):
        self.masking = keras.layers.Masking()

    def weighted(self, x, y, output):
        loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
        return loss(y, output, sample_weight=tf.abs(y[:, 0]))

    def masked(self, x, y, output):
        steps = tf.stack([x * tf.cast(x[:, :1] > 0.0, x.dtype), x], axis=1)
        error = output[:, tf.newaxis, :1] * tf.ones_like(steps)
        marked(error, {"mask": self.masking.compute_mask(steps)})
        return keras.losses.MeanSquaredError()(tf.zeros_like(steps), error, tf.abs(y[:, :1]))

    def ignored(self, x, y, output):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
        return loss(tf.cast(y[:, 0] > 0.0, tf.int32), output)


@pytest.mark.telling("masked")
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("name", ["weighted", "masked", "ignored"])
def test_a_keras_loss_is_the_whole_batchs_whatever_it_divides_by(name, float64):
    step = step_of(lambda model, x, y: getattr(Losses(), name)(x, y, model(x)))
    fit_alike(lambda: model_with(step), num_towers=3, batch_size=7)


def test_a_keras_loss_that_is_given_too_few_rows_is_warned_of():
    def step(model, data):
        x, y = data
        return {"value": tf.function(Losses().weighted)(x, y, model(x))}

    messages = warnings_of(step)
    assert any("'mean_squared_error' is neither a mean nor a sum over the examples" in m
               and "patches_test.py" in m for m in messages)


def slopes_of(model, x, y):
    """The slope of a mean, and of a sum, over the batch with respect to its rows."""
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        mean = mean_square(model, x, y)
        total = tf.reduce_sum((model(x) - y) ** 2)
    return tape.gradient(mean, x), tape.gradient(total, x)


def attacked(model, x, y):
    """Rows that are moved uphill in a loop."""
    def move(i, worse):
        with tf.GradientTape() as tape:
            tape.watch(worse)
            loss = mean_square(model, worse, y)
        return i + 1, worse + 0.5 * tape.gradient(loss, worse)

    return tf.while_loop(lambda i, _: i < 3, move, [0, x])[1]


def jacobians_of(model, x):
    with tf.GradientTape() as tape:
        tape.watch(x)
        output = tf.tanh(model(x))
    return tape.batch_jacobian(output, x)


def test_gradients_with_respect_to_rows_are_those_of_the_whole_batch(float64):
    """Of a mean they have n_i / N, in a loop, too; jacobians are row by row.

    Normalized, as in virtual adversarial training, the zeros of an empty shard would be NaN, for
    all towers.
    """
    def step(model, data):
        x, y = data
        with tf.GradientTape() as tape:
            of_mean, of_sum = slopes_of(model, x, y)
            normalized = of_mean / tf.norm(of_mean, axis=1, keepdims=True)
            logs = {
                "mean": tf.reduce_mean(tf.norm(of_mean, axis=1)),
                "sum": tf.reduce_mean(tf.norm(of_sum, axis=1)),
                "normalized": mean_square(model, x + 0.1 * normalized, y),
                "attacked": mean_square(model, attacked(model, x, y), y),
                "jacobians": tf.reduce_mean(jacobians_of(model, x) ** 2),
            }
            loss = logs["normalized"] + logs["attacked"] + logs["jacobians"]
        update(model, tape, loss)
        return logs

    fit_alike(lambda: model_with(step), num_towers=5, batch_size=7)  # uneven and empty shards


class Halves(keras.optimizers.SGD):
    """A user's optimizer with an `apply` of its own."""

    def apply(self, grads, trainable_variables=None):
        super().apply([g / 2.0 for g in grads], trainable_variables)


def test_output_gradients_may_divide_by_rows_and_an_own_apply_is_called_once_at_home(float64):
    def step(model, data):
        with tf.GradientTape() as tape:
            outputs = model(data[0])
        slope = (outputs - data[1]) / tf.cast(tf.shape(outputs)[0], outputs.dtype)
        weights = model.trainable_weights
        model.optimizer.apply(tape.gradient(outputs, weights, output_gradients=slope), weights)
        return {"slope": tf.reduce_sum(slope)}

    def make():
        model = model_with(step)
        model.compile(Halves(0.5), jit_compile=False)
        return model

    _, ours = fit_alike(make, num_towers=3, batch_size=4)
    assert ours.optimizer.iterations.numpy() == 3


HERE = "patches_test.py:"


def differentiates_weights_and_rows_at_once(model, data):
    with tf.GradientTape() as tape:
        tape.watch(data[0])
        loss = tf.reduce_mean(model(data[0]))
    tape.gradient(loss, [data[0], *model.trainable_weights])
    return {"loss": loss}


def computes_again(model, data):
    hidden = keras.remat(lambda rows: tf.tanh(model.layers[0](rows)))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(hidden(data[0]) ** 2)
    tape.gradient(loss, model.trainable_weights[:2])
    return {"loss": loss}


def learns_in_a_loop(model, data):
    x, y = data

    def learn(i, fast):
        with tf.GradientTape() as tape:
            tape.watch(fast)
            loss = tf.reduce_mean((x @ fast - y) ** 2)
        return i + 1, fast - 0.1 * tape.gradient(loss, fast)

    _, fast = tf.while_loop(lambda i, _: i < 2, learn, [0, tf.ones([4, 2])])
    return {"value": tf.reduce_mean(x @ fast)}


def has_classes_for_11_rows(model, data):
    similar = tf.matmul(data[0], data[0], transpose_b=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return {"loss": loss(keras.ops.arange(11), similar)}


@pytest.mark.parametrize("step, words", [
    (differentiates_weights_and_rows_at_once, [HERE, "persistent=True"]),
    (computes_again, [HERE, "keras.remat"]),
    (learns_in_a_loop, [HERE, "write the loop in Python"]),
    (lambda model, data: {"value": tf.py_function(tf.reduce_mean, [data[0]], tf.float32)},
     ["'value', which the step returns", "tf.ensure_shape"]),
    (lambda model, data: {"count": tf.shape(data[0])[0]}, ["'count'", "Cast it to float"]),
    (lambda model, data: {"loss": tf.reduce_mean(keras.layers.Dense(2)(data[0]))},
     ["'own'", "__init__"]),
    (lambda model, data: {"loss": towers.gather(tf.reduce_mean(data[0]))},
     [HERE, "has no batch axis"]),
    (lambda model, data: {"loss": tf.reduce_mean(towers.gather(tf.concat([data[0]] * 2, axis=0)))},
     [HERE, "Gather two views of a batch one by one"]),
    (has_classes_for_11_rows, [HERE, "with 11 others", "tf.ones_like"]),
], ids=lambda value: getattr(value, "__name__", ""))
def test_what_towers_cannot_compute_is_refused(step, words):
    message = refused(step)
    assert [word for word in words if word not in message] == [], message


# What lives outside of the step.


def assigns_a_part_of_a_variable():
    mine = tf.Variable([2.0, 3.0], name="mine")

    def step(model, data):
        mine[:1].assign([4.0])
        return {"loss": tf.reduce_mean(data[0]) * mine[0]}

    return step


def draws_by_a_generator():
    generator = tf.random.Generator.from_seed(1)
    return lambda model, data: {
        "loss": tf.reduce_mean(data[0] + generator.normal(tf.shape(data[0])))}


def writes_a_table():
    table = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 7.0)

    def step(model, data):
        table.insert(tf.constant([1]), tf.constant([2.0]))
        return {"loss": tf.reduce_mean(data[0])}

    return step


def writes_a_summary():
    writer = tf.summary.create_file_writer("unused")

    def step(model, data):
        with writer.as_default(step=1):
            tf.summary.scalar("mean", tf.reduce_mean(data[0]))
        return {"loss": tf.reduce_mean(data[0])}

    return step


def updates_a_metric_that_is_no_sum():
    metric = keras.metrics.Mean(name="largest")

    def step(model, data):
        metric.total.assign(tf.maximum(metric.total, tf.reduce_max(data[0])))
        return {"largest": metric.total}

    return step


@pytest.mark.parametrize("make, words", [
    (assigns_a_part_of_a_variable, [HERE, "'mine:0'", "add_weight"]),
    (draws_by_a_generator, ["keras.random"]),
    (writes_a_table, [HERE, "writes to a lookup table"]),
    (writes_a_summary, ["callback"]),
    (updates_a_metric_that_is_no_sum, [HERE, "largest", "gather"]),
], ids=lambda value: getattr(value, "__name__", ""))
def test_state_that_towers_cannot_share_is_refused(make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refused(make())
    assert [word for word in words if word not in message] == [], message
