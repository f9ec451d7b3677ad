"""Iterables that have a state, and a model that is soon traced to try them with."""

import numpy as np

import towers
from tests.parallel import pairs


def classifier():
    """6 numbers -> 3 classes, on 2 towers; compiled."""
    parallel = towers.make_parallel(pairs.classifier(), 2)
    parallel.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    return parallel


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


class Unsaved(Loader):
    """Its state holds what no checkpoint takes."""

    def _state(self):
        return {1, 2}
