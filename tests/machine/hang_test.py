"""Processes that hang say where and end; signals wait until a step is done."""

import gc
import multiprocessing
import os
import re
import signal
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf

import towers
from tests import processes
from tests.resuming import RESUME, train
from towers.machine import hang
from towers.machine.signals import deferred
from towers.resume import checkpoints

HERE = "tests.machine.hang_test"
RUN = (
    f"--model={HERE}:model --dataset={HERE}:data --num_gpus=2 --device=cpu --batch_size=16 "
    "--epochs=2 --run_dir=run --checkpoint_every=1"
).split()
NEVER = threading.Event()
NUM_CLASSES = 3  # of `sleepy_data`
FIT = """
import towers
from tests.machine import hang_test
towers.logical_cpus(2)
parallel = towers.make_parallel(hang_test.model((3,), 3), 2)
parallel.compile("sgd", "sparse_categorical_crossentropy")
parallel.fit(*hang_test.data()[0], batch_size=16, epochs=2, verbose=0,
             callbacks=[*hang_test.deaf_callbacks(), towers.HangTimeout(2)])
"""


def data():
    y = np.arange(64) % 3
    return (np.eye(3, dtype="float32")[y], y), (np.eye(3, dtype="float32"), np.arange(3))


class Source:
    """Examples, one of which may never come."""

    def __init__(self, hangs=None):
        self.hangs = hangs

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.hangs:
            NEVER.wait()
        return np.eye(3, dtype="float32")[index % 3], index % 3


def sleepy_data():
    return Source(hangs=60), Source()


def deaf_callbacks():
    return [keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: NEVER.wait())]


def blocked_disk():
    """After the first step, no file of this process is flushed to the disk any more."""

    def block(batch, logs):
        os.fsync = lambda descriptor: NEVER.wait()

    return [keras.callbacks.LambdaCallback(on_train_batch_end=block)]


class LostDevice(keras.layers.Layer):
    """A layer whose operation does not come back for the fourth batch."""

    calls = 0

    def call(self, x):
        def answer(value):
            self.calls += 1
            if self.calls > 6:  # 2 towers
                NEVER.wait()
            return value

        answered = tf.numpy_function(answer, [tf.stop_gradient(x)], x.dtype)
        return x + 0 * tf.ensure_shape(answered, x.shape)


def model(input_shape, num_classes, *layers):
    last = keras.layers.Dense(num_classes, activation="softmax")
    return keras.Sequential([keras.Input(input_shape), *layers, last])


def lost_device(*shape):
    return model(*shape, LostDevice())


def matrix(*values):
    return pytest.param(*values, marks=pytest.mark.matrix)


@pytest.mark.parametrize(
    "flag, phase, stack, step",
    [
        (f"--model={HERE}:lost_device", "step (towers 0-1 on /cpu:0, /cpu:1).", "answer", 3),
        matrix(f"--callbacks={HERE}:blocked_disk", "writing a checkpoint, in ", "wait", 0),
        matrix(f"--dataset={HERE}:sleepy_data", "reading data, in ", "__getitem__", 3),
        matrix(f"--callbacks={HERE}:deaf_callbacks", "a callback, in wait (", "wait", 3),
    ],
)
def test_a_run_that_hangs_says_where_and_keeps_its_checkpoint(flag, phase, stack, step, tmp_path):
    code, _, stderr = train(*RUN, "--hang_timeout=2", flag, cwd=tmp_path)
    assert code == hang.HUNG == 4, stderr
    assert re.fullmatch(
        rf"error: it hangs: no progress after [23] seconds in .*{re.escape(phase)}.* The stacks of "
        r"its threads stand in run/log\.txt\. Resume from the last checkpoint: python train\.py "
        r"--resume=run --trust_run_dir\. If it was at work, give it time with a larger "
        r"--hang_timeout\.\n",
        stderr,
    )
    log = (tmp_path / "run/log.txt").read_text()
    assert f" in {stack}\n" in log.partition(stderr)[2]
    path, _, wrong = checkpoints.read_newest(tmp_path / "run/checkpoints")
    assert wrong == [] and checkpoints.step_of(path) >= min(step, 1)
    if "deaf" in flag:
        code, _, stderr = train(*RESUME, "--hang_timeout=1", cwd=tmp_path)
        assert code == hang.HUNG and "after 1 seconds in a callback" in stderr


@pytest.mark.matrix
def test_a_fit_that_hangs_ends_with_the_stacks_on_stderr():
    done = processes.run("-c", FIT)
    assert done.returncode == hang.HUNG
    line, _, stacks = done.stderr.partition("error: it hangs: ")[2].partition("\n")
    assert "in the work between two steps, in wait (" in line
    assert "with towers.Resume among its callbacks it continues from its last checkpoint" in line
    assert " in <lambda>\n" in stacks


BEGIN = """
import os, signal, subprocess, sys, time
from towers.machine import hang
from towers.machine.signals import deferred
def watching(**values):
    return hang.Watch("tower 0 on /cpu:0", "Go on.", **values)
"""


def run(program):
    done = processes.run("-c", BEGIN + program)
    return done.returncode, done.stdout, done.stderr


def test_a_first_step_collects_no_garbage_and_later_code_does():
    class Spy(keras.layers.Layer):
        def call(self, x):
            collects.append(gc.isenabled())
            return x

    collects: list[bool] = []
    model = keras.Sequential([keras.Input((3,)), Spy(), keras.layers.Dense(1)])
    x, y = np.ones((4, 3), "float32"), np.ones((4, 1), "float32")
    collects.clear()
    towers.TowerStep(model, "sgd", "mse")(x, y)
    parallel = towers.make_parallel(model, 2)
    parallel.compile("sgd", "mse")
    parallel.fit(x, y, verbose=0)
    assert collects and not any(collects) and gc.isenabled()
    with pytest.raises(KeyError), hang.tracing("outside"), hang.tracing("inside"):
        raise KeyError
    assert gc.isenabled()


def test_what_is_no_hang_ends_nothing():
    """The time before the first step, its trace, a pager, a stop by Ctrl-Z, the end."""
    assert run("""
with watching(seconds=0.5):
    time.sleep(0.7)
    with hang.step("a step"):
        time.sleep(0.7)
    with hang.within("writing to the terminal", is_patient=True):
        time.sleep(0.7)
    awake = f"for i in 1 2 3 4; do sleep 1.2; kill -CONT {os.getpid()}; done"
    subprocess.Popen(["sh", "-c", awake])
    time.sleep(0.13)  # the watcher has looked
    os.kill(os.getpid(), signal.SIGTSTP)
    time.sleep(0.13)
    for _ in range(5):
        with hang.within("another phase"):
            time.sleep(0.15)
time.sleep(0.7)
""") == (0, "", "")


def test_the_second_step_that_takes_too_long_is_a_hang():
    code, _, stderr = run("""
with watching(seconds=0.4):
    for _ in range(2):
        with hang.step("a step"):
            time.sleep(1)
""")
    assert code == hang.HUNG
    assert " in a step (tower 0 on /cpu:0). The stacks of its threads follow. Go on.\n" in stderr


def test_a_function_in_c_that_holds_pythons_lock_is_ended():
    code, _, stderr = run("""
import re
with watching(seconds=1):
    with hang.step("a step"):
        pass
    time.sleep(0.5)
    re.fullmatch("(a+)+b", 60 * "a")
""")
    assert code == 1
    assert stderr.startswith("Timeout (0:00:03)!\n") and " in fullmatch\n" in stderr


@pytest.mark.matrix
@pytest.mark.parametrize(
    "timeout, seconds, code", [(None, 1.2, 0), (None, 5, hang.HUNG), (0, 5, 0)]
)
def test_the_default_is_ten_times_the_longest_phase_and_0_is_never(timeout, seconds, code):
    found, *_ = run(f"""
with watching(seconds={timeout}, least=0.4):
    with hang.step("a step"):
        time.sleep(0.3)
    time.sleep({seconds})
""")
    assert found == code


def test_sigusr1_shows_the_phase_and_the_stacks_of_busy_threads_and_ends_nothing():
    """Stacks that change while they are read would end it."""
    code, _, stderr = run("""
import threading
def work(depth=0):
    return work(depth + 1) if depth < 30 else None
def works():
    while True:
        work()
for _ in range(3):
    threading.Thread(target=works, daemon=True).start()
with deferred(), watching(seconds=0.0), hang.within("reading data"):
    for _ in range(30):
        time.sleep(0.03)
        os.kill(os.getpid(), signal.SIGUSR1)
""")
    assert code == 0
    assert " in work\n" in stderr and stderr.count("SIGUSR1 in reading data\n") > 25


@pytest.mark.parametrize("seconds", [-1, True, "soon", None])
def test_a_timeout_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match=r"seconds \("):
        towers.HangTimeout(seconds)


@pytest.fixture(params=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP], name="number")
def _number(request):
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


class Received(Exception):
    """What a handler of the caller's raises."""


def raise_received(number, frame):
    raise Received(number)


def test_a_signal_waits_for_the_check_and_is_then_received_as_before(number):
    signal.signal(number, raise_received)
    reached = []
    with pytest.raises(Received):
        with deferred() as pending:
            pending.obey(pending.number or 0)
            signal.raise_signal(number)
            reached.append("the end of the step")
            try:
                pending.obey(pending.number or 0)
            except Exception:
                pytest.fail("caught")
            reached.append("never")
    assert reached == ["the end of the step"]
    assert signal.getsignal(number) is raise_received


def test_an_error_inside_gives_the_handlers_back_and_stays_what_it_is(number):
    signal.signal(number, raise_received)
    with pytest.raises(ZeroDivisionError):
        with deferred() as pending:
            assert signal.getsignal(number) is not raise_received
            pending.obey(pending.number or 0)
            1 / 0
    assert signal.getsignal(number) is raise_received


def test_a_handler_that_returns_still_ends_the_run(number):
    received = []
    signal.signal(number, lambda number, frame: received.append(number))
    with pytest.raises(KeyboardInterrupt):
        with deferred() as pending:
            signal.raise_signal(number)
            pending.obey(pending.number or 0)
    assert received == [number]


def test_a_signal_that_is_ignored_stays_ignored(number):
    signal.signal(number, signal.SIG_IGN)  # as under nohup
    with deferred() as pending:
        signal.raise_signal(number)
        pending.obey(pending.number or 0)
        assert signal.getsignal(number) is signal.SIG_IGN


def test_another_thread_receives_no_signals_and_changes_no_handler(number):
    signal.signal(number, raise_received)
    seen = []

    def run():
        with deferred() as pending:
            seen.append(signal.getsignal(number))
            pending.obey(pending.number or 0)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [raise_received]


@pytest.mark.parametrize(
    "first, second, code, said",
    [
        ("SIGINT", "SIGTERM", 143, "first\n"),
        ("SIGHUP", "SIGHUP", -signal.SIGHUP, "first\nsaved\n"),
    ],
)
def test_the_second_signal_ends_the_process_at_once(first, second, code, said):
    """But for SIGHUP: the shell sends it as it ends, and then the system does."""
    assert run(f"""
with deferred():
    signal.raise_signal(signal.{first})
    print("first", flush=True)
    signal.raise_signal(signal.{second})
    print("saved", flush=True)
""")[:2] == (code, said)


def test_a_handler_of_sigusr1_stays():
    code, _, stderr = run("""
for handler in (print, signal.SIG_IGN):
    signal.signal(signal.SIGUSR1, handler)
    with deferred():
        signal.raise_signal(signal.SIGUSR1)
""")
    assert (code, stderr) == (0, "")


def test_signals_end_a_forked_child_as_if_none_were_deferred():
    context = multiprocessing.get_context("fork")
    with deferred() as pending:
        children = [context.Process(target=time.sleep, args=(30,)) for _ in range(5)]
        for child in children:
            child.start()
            child.terminate()  # it may arrive before the child runs a line of Python
        for child in children:
            child.join(10)
        ended = [child.exitcode for child in children]
        for child in children:
            child.kill()
        assert ended == [-signal.SIGTERM] * len(children)
        assert pending.number is None
        assert signal.getsignal(signal.SIGTERM) == pending.receive
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
