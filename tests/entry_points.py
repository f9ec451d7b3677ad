"""towers.train and fit with towers.Resume, each as a user's script that is run again to resume."""

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import keras

import towers
from tests.bits import bits
from tests.parallel.fits import STEPS, Fits, Interrupt, rows
from towers.app import run_dir
from towers.resume.ledger import LEDGER

L = keras.layers


def cosine():
    return keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.05, STEPS))


class Script(NamedTuple):
    """What a user edits: an optimizer, the model's first layers, a number that is added to x.

    With Dropout and BatchNormalization, unless it is `plain`.
    """

    optimizer: Callable = cosine
    units: int = 5
    plain: bool = False
    shift: float = 0.0

    def compiled(self):
        keras.utils.set_random_seed(3)
        noise = [] if self.plain else [L.BatchNormalization(), L.Dropout(0.3)]
        last = L.Dense(3, activation="softmax")
        model = keras.Sequential([keras.Input((6,)), L.Dense(self.units), *noise, last])
        model.compile(self.optimizer(), "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    def examples(self):
        x, y = rows(25)
        return x + self.shift, y


def digest(values):
    return hashlib.sha256(b"".join(map(bits, values))).hexdigest()


class Train:
    """towers.train on 3 towers. Each call has another seed, like a script that sets none."""

    seed = 0

    def run(self, directory, script=Script(), *, after=None, call=None, callbacks=list, **options):
        """Starts or resumes a run in a directory; returns (history, digest).

        after, call: see Interrupt. options: of TrainConfig.
        """
        model = script.compiled()
        Train.seed += 1
        keras.utils.set_random_seed(Train.seed)
        stop = [] if after is None else [Interrupt(after, call)]
        given = {
            "num_gpus": 2,
            "epochs": 2,
            "checkpoint_every": options.pop("every", 1),
            "ledger": 2,
            **options,
        }
        config = towers.TrainConfig(
            run_dir=str(directory), resume="auto", num_towers=3, batch_size=7, **given
        )
        callbacks = [*callbacks(), *stop]
        history = towers.train(
            config, callbacks, model=model, train=script.examples(), test=rows(5)
        )
        final = keras.saving.load_model(directory / run_dir.FINAL)
        # Keras' file holds no state of a random seed; the ledger has it.
        values = digest([*final.weights, *final.optimizer.variables])
        return history, values + (directory / LEDGER).read_text()


class Fit:
    """A parallel model's fit. Calls with the same script share one model, with other values."""

    models: dict = {}

    def run(self, directory, script=Script(), *, num_gpus=2, callbacks=list, **options):
        key = (script, num_gpus)
        if key not in self.models:
            self.models[key] = towers.make_parallel(script.compiled(), num_gpus, num_towers=3)
        data, ledger = script.examples(), directory / LEDGER

        def with_ledger():
            return [*callbacks(), towers.Ledger(ledger, every=2)]

        fits = Fits(self.models[key], *data, callbacks=with_ledger, validation_data=rows(5))
        history, _, values = fits.fit(directory, **options)
        return history, hashlib.sha256(b"".join(values)).hexdigest() + ledger.read_text()


ENTRY_POINTS = {"train": Train(), "fit": Fit()}
