"""Random-access sources for tests; their readers' processes import this, so: no TensorFlow here."""

import os
import time

import numpy as np

NUM_CLASSES = 10


class Pixels:
    """N examples: the pixels of example i are i, i + 1, ...; what goes wrong is said by index."""

    def __init__(self, count=20, shape=(2, 3, 1), raises=None, hangs=None, dies=None):
        self.count, self.shape = count, shape
        self.raises, self.hangs, self.dies = raises, hangs, dies

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.raises:
            raise KeyError("no such row")
        if index == self.hangs:
            time.sleep(60)
        if index == self.dies:
            os.kill(os.getpid(), 9)
        x = (index + np.arange(np.prod(self.shape))).astype(np.uint8).reshape(self.shape)
        return x, index % NUM_CLASSES


class Rows:
    """A source that is nothing but that."""

    def __init__(self, rows):
        self._rows = rows

    def __len__(self):
        return len(self._rows)

    def __getitem__(self, index):
        return self._rows[index]


def arrays(count, shape=(2, 3, 1)):
    """The same examples in memory."""
    pairs = [Pixels(count, shape)[index] for index in range(count)]
    return np.stack([x for x, _ in pairs]), np.array([y for _, y in pairs])


def splits():
    """What --dataset takes."""
    return Pixels(23), Pixels(7)
