"""Every test runs on 8 logical devices; they must exist before TensorFlow starts."""

import contextlib
import ctypes
import fnmatch
import functools
import gc
import glob
import os
import signal
import tempfile
from typing import Any

import numpy as np
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # TensorFlow reads it at import
# The processes that tests start find towers and tests.
_PATHS = [os.path.dirname(os.path.dirname(__file__)), *filter(None, [os.getenv("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(_PATHS)

_LONG = """
    programs_test tower_step_test pipeline_test compare_test drawn_test fit_data_test ran_once_test
    copies_test gradients_test workers_run_test interrupted_test continued_test errors_test
    remote_dir_test run_resumed_test train_test workers_test
""".split()  # the longest first: begun last, the others would be done before it
_GPU_MIB = 4096  # of each; leaves a large GPU's rest to the processes that tests start

for ignored, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):  # of what a script starts with "&" or nohup: processes of tests, too, obey these
    if signal.getsignal(ignored) is signal.SIG_IGN:
        signal.signal(ignored, handler)


def _of_finite_values(compare):
    """Makes a comparison of numpy.testing fail for NaN and infinity, which NumPy finds equal."""

    @functools.wraps(compare)
    def compare_finite(actual, desired, *args, **options):
        __tracebackhide__ = True
        for value in map(np.asarray, (actual, desired)):
            is_number = value.dtype.kind not in "OSUbiu"
            assert not is_number or np.isfinite(value).all(), "values that are not finite"
        compare(actual, desired, *args, **options)

    return compare_finite


# A test that expects NaN or infinity says so by np.isnan or np.isinf.
np.testing.assert_allclose = _of_finite_values(np.testing.assert_allclose)
np.testing.assert_array_equal = _of_finite_values(np.testing.assert_array_equal)


def pytest_configure(config):
    """Makes the devices, unless this process only hands tests to others: it needs no TensorFlow."""
    is_worker = hasattr(config, "workerinput")
    if not (is_worker or glob.glob("/dev/nvidia[0-9]*")):
        config.add_cleanup(_keep_programs())
    if is_worker or config.getoption("dist") == "no":
        from towers.machine.devices import has_gpus
        from towers.machine.logical import logical_cpus, logical_gpus

        logical_cpus(8, num_towers=2)
        if has_gpus():
            logical_gpus(8, memory_mib=_GPU_MIB)
    if _is_isolated(config):
        from tests.isolation import Isolation

        config.pluginmanager.register(Isolation(config))


def _keep_programs():
    """Lets XLA load what another process has compiled: runs of `train.py` have the same programs.

    Returns what removes them.
    """
    folder = tempfile.TemporaryDirectory(prefix="programs-")
    before = os.environ.get("TF_XLA_FLAGS", "")
    os.environ["TF_XLA_FLAGS"] = f"{before} --tf_xla_persistent_cache_directory={folder.name}"
    return folder.cleanup


def _is_isolated(config):
    """Whether each module has a process of its own. A GPU's driver would not survive the fork."""
    if not hasattr(config, "workerinput"):
        return False
    from towers.machine.devices import has_gpus

    return not has_gpus()


@pytest.hookimpl(tryfirst=True)  # before what `-m` deselects
def pytest_collection_modifyitems(items):
    """Marks the matrix; puts the longest files first; skips what needs a GPU, unless rehearsed."""
    from towers.machine.devices import REHEARSAL, has_gpus, is_rehearsal

    _mark_matrix(items)
    order = {stem: place for place, stem in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))
    if has_gpus() or is_rehearsal():
        return
    reason = f"TensorFlow sees no GPU here; {REHEARSAL}=1 runs this on CPU devices"
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def _mark_matrix(items):
    """The cases of a test that its marker `telling` does not name are `matrix`.

    Raises pytest.UsageError for a name that is none of the cases'.
    """
    tests: dict[tuple, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("telling"):
            tests.setdefault((item.path, item.originalname), []).append(item)
    for (path, name), cases in tests.items():
        patterns = cases[0].get_closest_marker("telling").args
        told = {p: [c for c in cases if fnmatch.fnmatchcase(c.callspec.id, p)] for p in patterns}
        missing = [pattern for pattern, found in told.items() if not found]
        if missing and len(cases) > 1:  # else one case was asked for
            raise pytest.UsageError(f"{path.name}: no case of {name} is {missing}.")
        for case in cases:
            if not any(case in found for found in told.values()):
                case.add_marker(pytest.mark.matrix)


@pytest.fixture(autouse=True, scope="module")
def _nothing_left(request):
    """Gives back what a module's models and graphs took; Keras' own fit would leave them all."""
    if _is_isolated(request.config):
        yield
        return
    from towers.machine.tensorflow_internals import custom_gradients_forgotten

    with custom_gradients_forgotten():
        yield
    import keras

    for value in vars(request.module).values():  # functools.cache of this module, not of towers
        if hasattr(value, "cache_clear") and value.__module__ == request.module.__name__:
            value.cache_clear()
    keras.utils.clear_session()
    gc.collect()
    # What models and graphs have freed lies scattered in glibc's heap, and stays the process's.
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture
def without_charts(monkeypatch):
    """Runs leave an empty results.png: drawing would take a sixth of a small run's time."""
    from towers.app.reporting import charts

    monkeypatch.setattr(charts, "draw_curves", lambda path, columns, *_: columns and path.touch())


@pytest.fixture
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def without_seed():
    """As in a script that sets none."""
    import keras
    import tensorflow as tf

    tf.random.set_seed(None)
    yield
    keras.utils.set_random_seed(0)


@pytest.fixture
def float64():
    """Models, losses and data in float64, where exactness is the point."""
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])
