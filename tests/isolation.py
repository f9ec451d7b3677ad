"""Each test module in a process of its own, forked from pytest's worker, which has only imported.

    worker        [ imports ] [ collects ] . . . . . . . . . . . . . . . . . . . . . .
    step_test                              [ TensorFlow starts, tests ]
    other_test                                                         [ the same ] ...

What a module's models, graphs and compiled programs have taken, the end of its process gives back;
nothing else gives back all of it: XLA keeps each program for good. xdist starts a new worker only
where one has died, and pytest-forked forks for each test, which would trace and compile anew what a
module's tests share.
"""

import gc
import multiprocessing
import os
import sys
import traceback
import warnings

import pytest
import tensorflow as tf

from tests import processes


class Isolation:
    """A plugin of one of xdist's workers."""

    def __init__(self, config):
        self._config, self._process, self._indices = config, None, {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        item.ihook.pytest_timeout_cancel_timer(item=item)  # its process has one, too
        self._indices = self._indices or _prepare(item.session.items)
        self._process = self._process or _Process(self._config, item.session.items)
        is_last = nextitem is None or nextitem.path != item.path
        try:
            for name, values in self._process.run(
                self._indices[item], None if is_last else self._indices[nextitem]
            ):
                _interactor(self._config).sendevent(name, **values)
        except (EOFError, ConnectionError):
            code, self._process = self._process.end(), None
            item.ihook.pytest_runtest_logreport(
                report=pytest.TestReport(
                    item.nodeid,
                    item.location,
                    {},
                    "failed",
                    f"The module's process has died: exit code {code}.",
                    "call",
                )
            )
            return True
        if is_last:
            self._process.end()
            self._process = None
        return True


def _prepare(items):
    """Before the first fork; returns each item's index.

    Raises RuntimeError where a module has started TensorFlow as it was imported: a forked process
    would wait for its threads for ever.
    """
    threads = tf.config.threading
    threads.set_inter_op_parallelism_threads(1)  # no longer possible then
    threads.set_inter_op_parallelism_threads(0)  # as it was: TensorFlow chooses
    gc.collect()
    gc.freeze()  # what is imported; else the processes would copy it
    gc.set_threshold(20_000, 50)  # graphs are many objects; the default takes 6% of the time
    processes.start_server()
    return {item: index for index, item in enumerate(items)}


class _Process:
    """Runs tests of one module as xdist's worker would, and sends what that would tell."""

    def __init__(self, config, items):
        self._pipe, theirs = multiprocessing.Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if self._pid == 0:
            code = 1
            try:
                self._pipe.close()
                _serve(theirs, config, items)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        theirs.close()

    def run(self, index, next_index):
        """Yields (name, values) of each event of one test.

        Raises:
            EOFError, ConnectionError: the process has died.
        """
        self._pipe.send((index, next_index))
        while (event := self._pipe.recv()) is not None:
            yield event

    def end(self):
        """Waits for it; returns its exit code, negative for a signal."""
        self._pipe.close()
        _, status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(status)


def _serve(pipe, config, items):
    """In the process: runs what it is sent, until nothing more comes."""
    (isolation,) = (p for p in config.pluginmanager.get_plugins() if isinstance(p, Isolation))
    config.pluginmanager.unregister(isolation)
    warnings.resetwarnings()  # the fork is within the first test, with that test's filters
    interactor = _interactor(config)
    interactor.sendevent = lambda name, **values: pipe.send((name, values))
    while True:
        try:
            index, next_index = pipe.recv()
        except EOFError:
            return
        interactor.item_index = index
        config.hook.pytest_runtest_protocol(
            item=items[index], nextitem=None if next_index is None else items[next_index]
        )
        pipe.send(None)


def _interactor(config):
    """What tells xdist's controller of a worker's tests."""
    return next(p for p in config.pluginmanager.get_plugins() if hasattr(p, "sendevent"))
