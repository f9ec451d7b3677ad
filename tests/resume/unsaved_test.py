"""A custom callback whose attributes change, and that does not say what its state is, is named."""

import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests.parallel.fits import classifier, rows
from towers.resume.snapshot import watch_callbacks

C = keras.callbacks


class Counter(C.Callback):
    seen = 0

    def on_train_batch_end(self, batch, logs=None):
        self.seen += 1


class Patient(C.EarlyStopping):
    def __init__(self):
        super().__init__("loss")
        self.epochs_seen = np.zeros(2)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.epochs_seen[0] += 1


class Averages(C.Callback):
    def on_train_begin(self, logs=None):
        self.means, self.steps = {"x": [0.0]}, tf.Variable(0)

    def on_train_batch_end(self, batch, logs=None):
        self.means["x"][0] += 1.0
        self.steps.assign_add(1)


class OnlyGets(Counter):
    def get_state(self):
        return self.seen


class SumOfEpoch(C.Callback):
    """An epoch sets it to 0: only a checkpoint within an epoch lacks it."""

    def on_epoch_begin(self, epoch, logs=None):
        self.begin()

    def begin(self):
        self.total, self.losses = 0.0, []

    def on_train_batch_end(self, batch, logs=None):
        self.total += 2.0
        self.losses.append(1.0)


class Both(OnlyGets):
    def set_state(self, state):
        self.seen = state


class Times(C.Callback):
    """What the next epoch or batch sets again; what others hold; what Keras saves."""

    def __init__(self):
        super().__init__()
        self.began, self.writer, self.best = None, None, None

    def on_epoch_begin(self, epoch, logs=None):
        self.began, self.current = time.time(), epoch
        self.writer = SimpleNamespace()

    def on_train_batch_begin(self, batch, logs=None):
        self.batch_began = time.time()

    def on_epoch_end(self, epoch, logs=None):
        self.best = epoch


CASES = [
    (Counter, ["seen"], ["seen"]),
    (Patient, ["epochs_seen"], []),
    (Averages, ["means", "steps"], ["means", "steps"]),
    (OnlyGets, ["seen"], ["seen"]),
    (SumOfEpoch, [], ["total", "losses"]),
    (Both, [], []),
    (Times, [], []),
    (lambda: C.ReduceLROnPlateau("loss"), [], []),
]


@pytest.mark.parametrize("make, at_the_end, within", CASES)
def test_changed_attributes_are_named_once_unless_an_epoch_sets_them_again(
    make, at_the_end, within
):
    for is_mid_epoch, expected in [(False, at_the_end), (True, within)]:
        callback, warned = make(), []
        optimizer = SimpleNamespace(learning_rate=tf.Variable(1.0))
        callback.set_model(SimpleNamespace(optimizer=optimizer))
        callback.on_train_begin()
        watched = watch_callbacks([callback])

        def save(is_mid_epoch):
            for each in watched:
                each.warn_once(warned.append, is_mid_epoch)

        save(False)
        assert not warned
        callback.on_epoch_begin(3)
        for batch in range(2):
            callback.on_train_batch_begin(batch)
            callback.on_train_batch_end(batch, {"loss": 0.5})
        if not is_mid_epoch:
            callback.on_epoch_end(3, {"loss": 0.5})
        save(is_mid_epoch)
        save(is_mid_epoch)
        named = [line.split(" its ")[1].split(", and ")[0].split(", ") for line in warned]
        assert named == ([expected] if expected else [])
        assert all(type(callback).__name__ in line and "get_state()" in line for line in warned)


def test_a_fit_warns_once_of_a_callback_that_will_begin_again(tmp_path):
    model = classifier()
    with pytest.warns(UserWarning) as caught:
        model.fit(
            *rows(),
            batch_size=7,
            epochs=3,
            verbose=0,
            callbacks=[towers.Resume(tmp_path, every=1), Counter(), Both(), Times()],
        )
    assert [str(w.message).split(" has")[0] for w in caught if "get_state" in str(w.message)] == [
        "callback Counter"
    ]
