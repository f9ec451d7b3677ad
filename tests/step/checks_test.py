"""Parts of a batch with different numbers of rows, and batch sizes in the code, are errors."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.step.small_step import batch, make_step
from towers.step import checks
from towers.divide.prefetch import place

L = keras.layers
DIFFER = "the parts of a batch differ in their number of rows: "


@pytest.mark.parametrize(
    "y, counts",
    [
        (np.ones([0, 1]), "x 2, y 0"),
        (np.array(1.0), "x 2, y none (a scalar)"),
        (1.0, "x 2, y none (a scalar)"),
    ],
)
def test_empty_and_scalar_parts_differ_from_the_others(y, counts):
    with pytest.raises(ValueError, match=re.escape(DIFFER + counts)):
        checks.check_rows(np.ones([2, 3]), y)


def assert_refused(call, variables, said):
    before = [variable.numpy() for variable in variables]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(DIFFER + said)
    np.testing.assert_equal([variable.numpy() for variable in variables], before)


@pytest.fixture(scope="module")
def step():
    """A step that has made an update of 8 rows."""
    made = make_step(num_towers=2)
    made(*batch(8))
    return made


CALLS = ("__call__", "train_batch", "test_batch", "gradients")


def test_a_batch_with_different_numbers_of_rows_changes_nothing_in_a_step(step):
    """Dropout's seed, BatchNormalization's statistics and the metrics' sums stay, too."""
    (x, y), (_, longer) = batch(8), batch(11)
    variables = [*step.model.variables, *step.optimizer.variables, *step.metrics_variables]
    for call in CALLS:
        assert_refused(lambda: getattr(step, call)(x, longer), variables, "x 8, y 11.")
        said = "x 8, y 8, sample_weight 11."
        assert_refused(lambda: getattr(step, call)(x, y, longer), variables, said)


def test_lists_of_numbers_are_errors_that_suggest_arrays(step):
    x, y = batch(8)
    lists = {"x": (x.tolist(), y), "y": (x, list(y)), "sample_weight": (x, y, [1.0] * 8)}
    for name, given in lists.items():
        for call in CALLS:
            message = rf"^{name} is a list of numbers.*asarray\({name}\)"
            with pytest.raises(ValueError, match=message):
                getattr(step, call)(*given)
    parallel = towers.make_parallel(step.model, 2)
    parallel.compile("sgd", "mse")
    with pytest.raises(ValueError, match="^x is a list of numbers"):
        parallel.train_on_batch(x.tolist(), y)


def test_the_optimizer_of_a_step_is_fixed(step):
    with pytest.raises(AttributeError, match="optimizer"):
        step.optimizer = keras.optimizers.SGD()


def test_placed_shards_with_another_number_of_examples_are_an_error(step):
    (x, y), (others, labels) = batch(8), batch(3)
    with pytest.raises(ValueError, match="the shard of tower 0 has 2 rows; of 8 examples it has 4"):
        step.train_batch(x, y, placed=place(step.machine, (others, labels, None)))
    torn = [(shard, y_shard[:1], None) for shard, y_shard, _ in place(step.machine, (x, y, None))]
    with pytest.raises(ValueError, match="the shard of tower 0 has 1/4 rows; "):
        step.train_batch(x, y, placed=torn)


def make_model():
    inputs = [keras.Input((4,)), keras.Input((2,))]
    hidden = L.Dropout(0.5)(L.BatchNormalization()(L.Concatenate()(inputs)))
    parallel = towers.make_parallel(keras.Model(inputs, L.Dense(1)(hidden)), 3)
    parallel.compile("sgd", "mse", metrics=["mae"])
    return parallel


def made(count, labels, weights=None):
    data = np.random.default_rng(0)
    x = data.normal(size=(count, 4)), data.normal(size=(min(count, 9), 2))
    rest = data.normal(size=(labels, 1)), *([] if weights is None else [np.ones(weights)])
    return tuple(tf.nest.map_structure(np.float32, (x, *rest)))


def endless(batch):
    """A dataset that does not know the number of rows."""
    signature = tf.nest.map_structure(lambda v: tf.TensorSpec([None, *v.shape[1:]]), batch)
    return tf.data.Dataset.from_generator(lambda: iter([batch] * 9), output_signature=signature)


def test_a_batch_with_different_numbers_of_rows_changes_nothing_in_a_parallel_model():
    model, good = make_model(), made(9, 9)
    model.fit(endless(good), steps_per_epoch=1, verbose=0)
    model.evaluate(endless(good), steps=1, verbose=0)
    model.reset_metrics()  # as each fit and evaluate begins
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    for counts, said in [
        ((9, 12), "x[0] 9, x[1] 9, y 12."),
        ((11, 11), "x[0] 11, x[1] 9, y 11."),
        ((9, 9, 5), "x[0] 9, x[1] 9, y 9, sample_weight 5."),
    ]:
        bad = made(*counts)
        for call in [
            lambda: model.fit(endless(bad), steps_per_epoch=2, verbose=0),
            lambda: model.evaluate(endless(bad), verbose=0),
            lambda: model.train_on_batch(*bad),
            lambda: model.test_on_batch(*bad),
        ]:
            assert_refused(call, variables, said)
    assert_refused(lambda: model.predict(endless(made(11, 11)), verbose=0), variables, "x[0] 11,")
