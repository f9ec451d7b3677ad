"""Epochs of steps, each with its validation; and who is told of each."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from towers.resume.run_dir import Result
from towers.resume.train_state import TrainState
from towers.app.datasets.batches import ordered_batches, shuffled_batches
from towers.machine.signals import Pending
from towers.step.first_error import values_explained
from towers.step.nonfinite import NonFiniteError
from towers.step.prefetch import Batch, WeightedBatch, prefetched
from towers.app.training.build import Run
from towers.app.training.listener import Listener
from towers.app.training.pace import Pace


def num_steps(run: Run) -> int:
    """The updates of a run, the limit of --max_steps included."""
    steps = run.config.epochs * run.steps_an_epoch
    return steps if run.config.max_steps is None else min(steps, run.config.max_steps)


class Epochs:
    """The epochs of a run that are left."""

    def __init__(
        self, run: Run, train_state: TrainState, pace: Pace, listener: Listener, pending: Pending
    ) -> None:
        """
        Args:
            run: what is trained.
            train_state: where the run stands; it moves with each step and each epoch.
            pace: is told when steps and epochs end.
            listener: is told of every moment.
            pending: the signal that waits for the end of a step.
        """
        self._run, self._train_state, self._pace = run, train_state, pace
        self._listener, self._pending = listener, pending

    def train(self) -> None:
        """Trains until the steps are done, or a callback sets `model.stop_training`."""
        try:
            self._train()
        except BaseException:
            self._listener.stop()
            raise

    def _train(self) -> None:
        train_state, model = self._train_state, self._run.step.model
        patience = self._run.config.early_stopping
        self._listener.begin()
        model.stop_training = train_state.is_stopped(patience)
        while train_state.epoch_step > 0 or (
            train_state.step < num_steps(self._run) and not model.stop_training
        ):
            self._train_epoch()
            signal = self._agree()
            model.stop_training = train_state.is_stopped(patience)
            self._pending.obey(signal)
        self._listener.end()

    def _train_epoch(self) -> None:
        """One epoch, or what is left of it, and its validation."""
        run, train_state = self._run, self._train_state
        self._listener.begin_epoch()
        self._pace.start_epoch()
        self._train_steps()
        logs = {name: float(value) for name, value in train_state.logs.items()}
        self._listener.begin_validation()
        if run.test is not None:
            values = evaluate(run, self._check, self._listener)
            logs |= {f"val_{name}": value for name, value in values.items()}
        self._pace.end_epoch()
        values = {name: logs[name] for name in run.columns}
        result = Result(
            train_state.epoch + 1, values, self._pace.epoch_seconds, self._pace.examples_per_second
        )
        train_state.end_epoch(result, logs, run.monitor)
        self._listener.end_epoch(result, logs)

    def _train_steps(self) -> None:
        """The epoch's steps that are left."""
        run, train_state = self._run, self._train_state
        if train_state.epoch_step == 0:
            run.step.reset_metrics()
        batches = shuffled_batches(
            run.train, run.batch_size, run.config.seed, train_state.epoch, train_state.epoch_step
        )
        count = min(run.steps_an_epoch, num_steps(run) - train_state.epoch * run.steps_an_epoch)
        # After a stop in mid-epoch the validation is left; before an epoch, as in Keras, a step.
        is_over = run.step.model.stop_training and train_state.epoch_step > 0
        left = 0 if is_over else count - train_state.epoch_step
        ahead = prefetched(run.step, batches)
        for _, batch in zip(range(left), ahead, strict=False):
            self._listener.begin_step()
            self._train_step(batch)
            self._listener.end_step()
            signal = self._agree()
            if run.step.model.stop_training:
                break
            self._pending.obey(signal)
            if train_state.epoch_step < count:
                self._listener.between_steps()

    def _agree(self) -> int:
        """A signal to one worker, or a callback's wish to stop in one, is every worker's.

        Returns:
            The signal, which ends all workers; 0 where none has come.
        """
        train_state, model = self._train_state, self._run.step.model
        signal, stop, stopped = self._run.workers.all_reduce_max(
            self._pending.number or 0, int(model.stop_training), int(train_state.stopped)
        )
        model.stop_training, train_state.stopped = bool(stop), bool(stopped)
        if signal:
            self._run.workers.barrier()
        return signal

    def _check(self) -> None:
        """Raises StopRequested, in every worker, when a signal has come to one."""
        self._pending.obey(self._agree())

    def _train_step(self, batch: Batch | WeightedBatch) -> None:
        """One update."""
        run, train_state = self._run, self._train_state
        train_state.in_step = True
        try:
            with values_explained(f"step {train_state.step + 1:,}"):
                logs = run.step.train_batch(**batch._asdict())
        except NonFiniteError:  # in every worker
            train_state.in_step = False  # nothing has changed
            run.workers.barrier()
            raise
        train_state.add_step(logs)
        self._pace.add_step(tf.nest.flatten(batch.x)[0].shape[0])


def evaluate(
    run: Run, check: Callable[[], None] | None = None, listener: Listener = Listener()
) -> dict[str, float]:
    """{"loss": ..., "accuracy": ...} of the test examples, computed on the towers.

    Args:
        run: the run, with test examples.
        check: called before each batch; may raise.
        listener: is told of each batch.
    """
    assert run.test is not None
    listener.begin_test()
    run.step.reset_metrics()
    logs: dict[str, Any] = {}
    batches = ordered_batches(run.test, run.batch_size)
    ahead = prefetched(run.step, batches)
    for i, batch in enumerate(ahead):
        if check is not None:
            check()
        listener.begin_test_step(i)
        with values_explained("a batch of the test examples"):
            logs = run.step.test_batch(**batch._asdict())
        run.step.strategy.trust(True)
        listener.end_test_step(i, logs)
    run.step.strategy.trust(False)
    values = {name: float(value) for name, value in logs.items()}
    listener.end_test(values)
    return values
