"""Iterables of examples that have a state: `--dataset=tests.app.datasets.loaders:load`."""

import numpy as np

from tests.resuming import data as arrays

NUM_CLASSES = 3
NUM_EXAMPLES = 50, 20


class Loader:
    """Shuffled examples, anew in each pass; the state is an order, a position, a generator's.

    on_iterator: its iterators have the state, and no one else.
    """

    def __init__(self, x, y, names=("get_state", "set_state"), on_iterator=True):
        self.x, self.y = x, y
        self.random = np.random.default_rng(5)
        self.order, self.at = None, 0
        self.read = []  # the positions in their pass of what was read
        self._names = names if on_iterator else ()
        for name, method in zip(names, (self._state, self._go_on), strict=True):
            if not on_iterator:
                setattr(self, name, method)

    def _state(self):
        order = None if self.order is None else self.order.copy()
        return {"order": order, "at": self.at, "random": self.random.bit_generator.state}

    def _go_on(self, value):
        self.order, self.at = value["order"], value["at"]
        self.random.bit_generator.state = value["random"]

    def __iter__(self):
        iterator = _Iterator()
        iterator.loader = self
        for name, method in zip(self._names, (self._state, self._go_on), strict=False):
            setattr(iterator, name, method)
        return iterator


class _Iterator:
    def __iter__(self):
        return self

    def __next__(self):
        loader = self.loader
        if loader.order is None:
            loader.order = loader.random.permutation(len(loader.x))
        if loader.at >= len(loader.x):
            loader.order, loader.at = None, 0
            raise StopIteration
        chosen = loader.order[loader.at]
        loader.read.append(loader.at)
        loader.at += 1
        return loader.x[chosen], loader.y[chosen]


class Sized(Loader):
    """One that knows its length."""

    def __len__(self):
        return len(self.x)


def load():
    train, test = arrays()
    return Loader(*train), Loader(*test)


def itself():
    train, test = arrays()
    names = ("state_dict", "load_state_dict")
    return Loader(*train, names, False), Loader(*test, names, False)


def batched():
    train, _ = arrays()
    return (Sized(train[0][None], train[1][None]),) * 2


class Unsaved(Loader):
    """Its state holds what no checkpoint takes."""

    def _state(self):
        return {1, 2}


def unsaved():
    train, test = arrays()
    return Unsaved(*train), Unsaved(*test)
