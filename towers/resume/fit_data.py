"""Leads Keras' loop through the data of a fit: a step that is done reads, or does not even read.

fit(initial_epoch=first)        first is the epoch with which the data began
    epochs that are done        steps and validations read only what later batches need
    the epoch under way         its first steps are done, the others train
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakValueDictionary

import keras
import tensorflow as tf

from towers.machine import hang, signals
from towers.machine.terminal import Lines
from towers.resume.random_state import random_state, set_random_state
from towers.resume.replay import Replay
from towers.resume.resumed_data import ALL, NOTHING, Arguments, train_data, validation_data
from towers.resume.stateful import Json
from towers.resume.train_state import Logs, TrainState


# Data that fits of this process have read, by `id`. Some may be in another order by now.
_read: WeakValueDictionary[int, object] = WeakValueDictionary()


class FitData:
    """Holds the data of one fit, for training and for validation."""

    def __init__(
        self,
        model: keras.Model,
        arguments: Arguments,
        state: TrainState,
        seed: int,
        pending: signals.Pending,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """
        arguments: the arguments of `fit` by name, after its `validation_split`.
        state: the point that the fit has reached; the caller updates it.
        seed: gives the order of arrays in a script that sets no seed.
        pending: holds a signal, which ends the reading of data that are done.
        saved: the result of `to_json` to resume from.
        """
        self._model, self._state, self._pending = model, state, pending
        self._random = None if saved is None else saved["random"]
        self.replay = Replay(state.epoch, None if saved is None else saved["replay"])
        self._data = train_data(
            arguments,
            self.replay,
            seed,
            done=lambda: state.step,
            saved=saved,
        )
        self._validation = validation_data(arguments, self.replay)
        self._has_one_pass = arguments["steps_per_epoch"] is not None
        self.spec, self.identity = self._data.spec, self._data.identity
        self.num_batches = self._data.num_batches
        self._resumed_epoch, self._within = state.epoch, state.epoch_step
        is_resumed = saved is not None and state.epoch < arguments["epochs"]
        x, *_ = keras.utils.unpack_x_y_sample_weight(arguments["validation_data"])
        for name, value, data in (
            ("x", arguments["x"], self._data),
            ("validation_data", x, self._validation),
        ):
            _note_read(name, value, is_error=is_resumed and not data.is_plain)
        is_direct = self._data.is_direct and self._validation.is_direct
        if is_direct:
            self.replay.jump(is_within=state.epoch_step > 0)
        elif state.stopped and state.epoch_step == 0:
            self.replay.begin_anew(state.epoch)  # as Keras' next `fit` does
        self.first_epoch = state.epoch if is_direct else self.replay.now.first
        self._epoch = self._step = 0  # what Keras' loop is at
        self._num_skipped = 0
        self._lines: Lines | None = None

    def to_json(self) -> dict[str, Json]:
        """Returns all that a resumed fit needs, as JSON values."""
        # First, because a thread may read the next batch by now: its state takes precedence.
        random = random_state()
        return {**self._data.state(), "replay": self.replay.to_json(), "random": random}

    def arguments(self) -> dict[str, object]:
        """Returns the arguments for Keras' fit that stand for the data."""
        return {
            "x": self._data.x,
            "y": None,
            "sample_weight": None,
            "validation_data": self._validation.x,
        }

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside the context, steps that are done do not train, and their validation is left out.

        `begin_epoch` puts the test function of the model back.
        """
        model = self._model
        model.make_train_function()
        function, self._test_function = model.train_function, model.test_function

        def train(iterator: tf.data.Iterator) -> Logs:
            nonlocal function
            if self.replay.begin_pass(iterator):
                self._data.begin_pass(self.replay.now.num_passes)
            if self.is_done:
                self._skip(iterator)
                return dict(self._state.logs)
            logs = function(iterator)
            if model.train_function is not train:  # the first step puts a faster one there
                function, model.train_function = model.train_function, train
            self.replay.now.pass_step += model.steps_per_execution
            return logs

        model.train_function = train
        if not self.replay.is_over:
            model.test_function = self._skip_test
        try:
            yield
        finally:
            self.replay.is_closed = True
            if model.train_function is train:
                model.train_function = function
            self._put_test_function_back()

    def _put_test_function_back(self) -> None:
        if self._model.test_function == self._skip_test:
            self._model.test_function = self._test_function

    @property
    def is_before(self) -> bool:
        """Returns whether the epoch that Keras is in is done."""
        return self._epoch < self._resumed_epoch

    @property
    def is_done(self) -> bool:
        """Returns whether the step that Keras is in is done."""
        is_within = self._epoch == self._resumed_epoch and self._step < self._within
        return self.is_before or is_within

    def at_epoch(self, epoch: int) -> None:
        """Notes that Keras begins an epoch. An epoch that is not done gets its random state."""
        self._epoch, self._step = epoch, 0
        if not self.is_before:
            self._put_test_function_back()
            if not self._within:
                self.reach()

    def begin_epoch(self) -> None:
        """Begins an epoch that is not done, after its callbacks have run."""
        self.replay.begin_epoch(is_within=self._within > 0 and self._epoch == self._resumed_epoch)

    def at_step(self, batch: int) -> None:
        """Notes that Keras begins the step that begins with `batch`."""
        self._step = batch

    def end_step(self, batch: int) -> None:
        """Ends a step that is done, and obeys a signal."""
        if self.is_before:
            self._obey()  # there is nothing to save
        elif batch + 1 >= self._within:
            self.reach()

    def reach(self) -> None:
        """Ends what is done, with the random state that the fit had there."""
        if self._random is not None:
            set_random_state(self._states_left())
            self._random = None
        self.replay.reach()

    def _states_left(self) -> dict[str, Json]:
        """Returns the random states that data did not draw from while they were read again.

        A generator that draws from a state has moved it to where it was. When the state was saved,
        a thread had read a few more batches already.
        """
        then = self.replay.then
        if self._data.reads != ALL or then is None or self._random is None:
            return self._random or {}
        now = random_state()
        return {name: self._random[name] for name in now if now[name] == then.at_start[name]}

    def end_epoch(self) -> None:
        """Counts the epoch as complete."""
        now, then = self.replay.now, self.replay.then
        if self.is_before and then is not None:
            now.epochs.append(then.epochs[len(now.epochs)])
        else:
            now.epochs.append(self._state.epoch_step)

    def _skip(self, iterator: tf.data.Iterator) -> None:
        """Reads the batches of a step that is done if later ones depend on it."""
        replay = self.replay
        assert replay.then is not None
        if self.is_before and self._step >= replay.then.epochs[len(replay.now.epochs)]:
            if self._data.reads == ALL:
                self._read_batch(iterator)  # meets the end, as then
            raise StopIteration
        is_needed = not replay.is_before_pass and (self._has_one_pass or not self.is_before)
        if self._data.reads == NOTHING or self._data.reads != ALL and not is_needed:
            return
        for index in range(self._model.steps_per_execution):
            if not self._read_batch(iterator):
                if index == 0:
                    raise ValueError(
                        f"x ends after {self._num_skipped} batches, and the fit has done more."
                    )
                break
        if self.is_before:
            self._show()

    def _skip_test(self, iterator: tf.data.Iterator) -> dict[str, float]:
        """Takes the place of Keras' test function for a validation that is done."""
        self._obey()
        if self._validation.reads == ALL:
            for index in range(self._model.steps_per_execution):
                if not self._read_batch(iterator) and index == 0:
                    raise StopIteration
            self._show()
        elif not self._validation.ends:
            self._model.stop_evaluating = True
        return {}

    def _read_batch(self, iterator: tf.data.Iterator) -> bool:
        """Reads a batch and drops it. Returns whether there was one."""
        with hang.within("reading data"):
            batch = next(iterator, None)
        self._num_skipped += batch is not None
        return batch is not None

    def _show(self) -> None:
        if self._lines is None:
            self._lines = Lines("reading again the batches of the epochs that are done")
        self._lines.show(self._num_skipped)

    def _obey(self) -> None:
        self._pending.obey(self._pending.number or 0)


def _note_read(argument: str, data: object, is_error: bool) -> None:
    """Notes that a fit reads these data; raises ValueError if one has read them, and it matters."""
    if is_error and _read.get(id(data)) is data:
        raise ValueError(
            f"{argument} ({type(data).__name__}) has been read by an earlier fit of this process, "
            "so that this fit cannot find its order again. Make it again before the fit, or start "
            "the script again."
        )
    with suppress(TypeError):  # an array or a tuple cannot be noted, and need not be
        _read[id(data)] = data
