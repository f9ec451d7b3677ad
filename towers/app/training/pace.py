"""The pace of a run, and the time that it still takes."""

import time


class Pace:
    """Times the steps of one epoch after the other.

    The run's first step is left out of the speed: it traces the graph.
    """

    def __init__(self, num_steps: int, num_epochs: int) -> None:
        """Args: the steps, and the epochs (each ends with a validation), that the run has left."""
        self._steps_left = num_steps
        self._validations_left = num_epochs
        self._run_began = time.perf_counter()
        self._is_traced = False
        self._step_seconds = 0.0
        self._validation_seconds = 0.0
        self.start_epoch()

    def start_epoch(self) -> None:
        """An epoch's first step is about to begin."""
        self._epoch_began = self._began = self._ended = time.perf_counter()
        self._steps = self._examples = self._untimed_examples = 0

    def add_step(self, num_examples: int) -> None:
        """A step has ended."""
        self._steps_left -= 1
        self._ended = time.perf_counter()
        if self._is_traced:
            self._steps += 1
            self._examples += num_examples
            self._step_seconds = (self._ended - self._began) / self._steps
        else:
            self._is_traced = True
            self._untimed_examples = num_examples
            self._began = self._ended

    def end_epoch(self) -> None:
        """An epoch's validation has ended."""
        self._validations_left -= 1
        self._validation_seconds = time.perf_counter() - self._ended

    @property
    def examples_per_second(self) -> float:
        """The rate of this epoch's steps, the tracing one left out if there is another."""
        if self._steps:
            return self._examples / (self._ended - self._began)
        seconds = self._ended - self._epoch_began
        return self._untimed_examples / seconds if seconds else 0.0

    @property
    def epoch_seconds(self) -> float:
        """Since this epoch began: training, and validation once that has ended."""
        return time.perf_counter() - self._epoch_began

    @property
    def run_seconds(self) -> float:
        """Since the run began to train."""
        return time.perf_counter() - self._run_began

    @property
    def seconds_left(self) -> float | None:
        """An estimate for the rest of the run; None without one, and where nothing is left."""
        if not self._step_seconds or not self._validations_left:
            return None
        return (
            self._steps_left * self._step_seconds
            + self._validations_left * self._validation_seconds
        )
