"""What the tests of towers.Resume share: a parallel model that is made once, and fits of it.

To begin as a fresh process would, all of its variables are given their first values again; to be
resumed, other values than any process would have.
"""

import keras
import numpy as np

import towers
from towers.resume import resumed_fit

L = keras.layers
STEPS = 8  # two epochs of 25 examples: 7, 7, 7 and 4


def classifier(num_gpus=2, **options):
    """Dropout, BatchNormalization and Adam with a schedule, on 3 towers; compiled."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            L.Dense(5),
            L.BatchNormalization(),
            L.Dropout(0.3),
            L.Dense(3, activation="softmax"),
        ]
    )
    parallel = towers.make_parallel(model, num_gpus, num_towers=3)
    schedule = keras.optimizers.schedules.CosineDecay(0.05, STEPS)
    parallel.compile(
        **{
            "optimizer": keras.optimizers.Adam(schedule),
            "metrics": ["accuracy"],
            "loss": "sparse_categorical_crossentropy",
            **options,
        }
    )
    return parallel


def rows(count=25):
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 6)).astype("float32"), rng.integers(0, 3, count)


def variables(model):
    found = [*model.variables, *model.metrics_variables, *model.optimizer.variables]
    return list({id(variable): variable for variable in found}.values())


class Batches(keras.utils.PyDataset):
    """Examples in batches of 7, by index; `reads` notes which."""

    def __init__(self, data=None, **options):
        super().__init__(**options)
        self.data, self.reads = data or rows(), []

    def __len__(self):
        return -(-len(self.data[0]) // 7)

    def __getitem__(self, index):
        self.reads.append(index)
        return tuple(part[7 * index : 7 * index + 7] for part in self.data)


class Recorder(keras.callbacks.Callback):
    """What a loop tells callbacks, in order, with the names of the logs."""

    def __init__(self):
        super().__init__()
        self.events = []

    def on_epoch_begin(self, epoch, logs=None):
        self.events.append(("epoch", epoch))

    def on_train_batch_begin(self, batch, logs=None):
        self.events.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.events.append(("end", batch, *sorted(logs)))

    def on_test_batch_end(self, batch, logs=None):
        self.events.append(("test", batch, *sorted(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.events.append(("logs", epoch, *sorted(logs)))


class Remembers(keras.callbacks.Callback):
    """Has a value as its state."""

    def __init__(self, value=None):
        super().__init__()
        self.value = value

    def get_state(self):
        return self.value

    def set_state(self, state):
        self.value = state


class Interrupt(keras.callbacks.Callback):
    """Raises, or calls a function, before the step after so many of this process."""

    def __init__(self, after, call=None):
        super().__init__()
        self._left, self._call = after, call

    def on_train_batch_begin(self, batch, logs=None):
        if self._left == 0:
            if self._call is None:
                raise InterruptedError
            self._call()
        self._left -= 1


class Fits:
    """Fits of one model into one directory."""

    def __init__(self, model, *data, seeds=(1, 2), callbacks=lambda: [], **options):
        """
        Args:
            data: of fit; functions are called for each fit anew.
            seeds: of the first process, and of those after it, as of a script that sets none.
            callbacks: makes the user's. options: of fit.
        """
        self.model, self._data, self._seeds = model, data, seeds
        self._options = {"batch_size": 7, "epochs": 2, "verbose": 0, **options}
        self._callbacks = callbacks
        if not hasattr(model, "first_values"):
            model.optimizer.build(model.trainable_variables)
            first = {id(v): v.numpy() for v in [*model.variables, *model.optimizer.variables]}
            model.fit(*rows(7), verbose=0)  # makes the metrics' sums
            vars(model)["first_values"] = [
                first.get(id(v), np.zeros_like(v.numpy())) for v in variables(model)
            ]

    def fit(self, directory, *, after=None, call=None, **options):
        """(history, epochs, values) of a fit as the first of a new process, or of the next one.

        `after` and `call` are those of an Interrupt; `options` are of fit, and `every`.
        """
        resume = towers.Resume(directory, every=options.pop("every", 1))
        resumed_fit.completed.clear()  # as in a new process
        is_new = not (directory / "checkpoints").exists()
        for variable, value in self._first_values():
            is_rate = "learning_rate" in variable.path  # which each process compiles alike
            variable.assign(value if is_new or is_rate else value + 3)
        stop = [] if after is None else [Interrupt(after, call)]
        return self._run([resume, *stop], seed=self._seeds[not is_new], **options)

    def plain(self, **options):
        """The same without a Resume."""
        for variable, value in self._first_values():
            variable.assign(value)
        return self._run([], seed=self._seeds[0], **options)

    def interrupted(self, directory, after, **options):
        """The outcome of a fit that is interrupted after each of these numbers of steps."""
        for steps in after:
            try:
                self.fit(directory, after=steps, **options)
            except InterruptedError:
                continue
            raise AssertionError("not interrupted")
        return self.fit(directory, **options)

    def _first_values(self):
        return zip(variables(self.model), vars(self.model)["first_values"], strict=True)

    def _run(self, callbacks, *, seed, **options):
        keras.utils.set_random_seed(seed)
        data = [part() if callable(part) else part for part in self._data]
        history = self.model.fit(
            *data, callbacks=[*self._callbacks(), *callbacks], **{**self._options, **options}
        )
        values = [variable.numpy() for variable in variables(self.model)]
        return history.history, history.epoch, [value.tobytes() for value in values]
