"""Processes that hang: each says where, leaves its stacks and ends; with its last checkpoint."""

import re
import signal

import pytest

import towers
from tests import forked
from tests.resuming import ROOT, train
from towers.resume import checkpoints
from towers.machine import hang

RUN = ("--model=tests.hanging:model", "--dataset=tests.hanging:data", "--num_gpus=2",
       "--device=cpu", "--batch_size=16", "--epochs=2", "--run_dir=run", "--checkpoint_every=1")


def hung(tmp_path, *flags):
    """What a run that hangs says on stderr, its log, and its newest checkpoint's step."""
    code, _, stderr = train(*RUN, "--hang_timeout=2", *flags, cwd=tmp_path)
    assert code == hang.HUNG == 4, stderr
    assert re.fullmatch(
        r"error: it hangs: no progress after [23] seconds in .*\. The stacks of its threads stand "
        r"in run/log\.txt\. Resume from the last checkpoint: python train\.py --resume=run\. If it "
        r"was at work, give it time with a larger --hang_timeout\.\n", stderr
    )
    log = (tmp_path / "run" / "log.txt").read_text()
    assert 'File "' in log.partition(stderr)[2]
    path, _, wrong = checkpoints.read_newest(tmp_path / "run" / "checkpoints")
    assert wrong == []
    return stderr, log, checkpoints.step_of(path)


def test_a_device_that_never_answers_is_named_with_its_towers(tmp_path):
    line, log, step = hung(tmp_path, "--model=tests.hanging:lost_device")
    assert " step (towers 0-1 on /cpu:0, /cpu:1). " in line
    assert " in answer\n" in log and step > 0


@pytest.mark.matrix
def test_a_disk_that_blocks_leaves_the_checkpoint_before(tmp_path):
    line, log, step = hung(tmp_path, "--callbacks=tests.hanging:blocked_disk")
    assert " seconds in writing a checkpoint, in " in line
    assert " in block\n" in log and step == 0


@pytest.mark.matrix
def test_a_source_that_hangs_is_named_by_its_phase(tmp_path):
    line, log, _ = hung(tmp_path, "--dataset=tests.hanging:sleepy_data")
    assert " seconds in reading data, in " in line
    assert " in read_from_a_disk_that_is_gone\n" in log  # of the thread that reads


@pytest.mark.matrix
def test_a_callback_that_hangs_is_named_by_its_phase_and_another_timeout_goes_on(tmp_path):
    line, log, step = hung(tmp_path, "--callbacks=tests.hanging:deaf_callbacks")
    assert " seconds in a callback, in wait (" in line
    assert " in on_epoch_end\n" in log and step == 3
    code, _, stderr = train(
        "--resume=run", "--hang_timeout=1", cwd=tmp_path, fault="kill('USR1')"
    )
    assert code == hang.HUNG and "after 1 seconds in a callback" in stderr
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "SIGUSR1 after 0 seconds in " in log


@pytest.mark.matrix
def test_a_fit_that_hangs_ends_with_the_stacks_on_stderr():
    done = forked.run("-m", "tests.hanging", cwd=ROOT)
    assert done.returncode == hang.HUNG
    line, _, stacks = done.stderr.partition("error: it hangs: ")[2].partition("\n")
    assert "in the work between two steps, in wait (" in line
    assert "with towers.Resume among its callbacks it goes on from its last checkpoint" in line
    assert " in on_epoch_end\n" in stacks


BEGIN = """
import os, signal, subprocess, sys, time
from towers.machine import hang
def watching(**values):
    return hang.watching(hang.Watched("tower 0 on /cpu:0", "Go on.", **values))
"""


def run(program):
    done = forked.run("-c", BEGIN + program, cwd=ROOT)
    return done.returncode, done.stdout, done.stderr


def test_what_is_no_hang_ends_nothing():
    """The time before the first step, its trace, a pager, a stop by Ctrl-Z, a debugger, the end."""
    assert run("""
with watching(seconds=0.5):
    time.sleep(0.7)
    with hang.step("a step"):
        time.sleep(0.7)
    with hang.within("writing to the terminal", is_patient=True):
        time.sleep(0.7)
    subprocess.Popen(["sh", "-c", f"sleep 0.7; kill -CONT {os.getpid()}"])
    time.sleep(0.13)  # the watcher has looked
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.13)
    hang.enter("another phase")
    exec("import time; time.sleep(0.7)", {"__name__": "pdb"})
    for _ in range(5):
        hang.enter("another phase")
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


def test_a_function_in_c_that_holds_pythons_lock_is_ended_from_outside():
    code, _, stderr = run("""
import re
with watching(seconds=2):
    with hang.step("a step"):
        pass
    time.sleep(1)
    re.fullmatch("(a+)+b", 60 * "a")
""")
    assert code == -signal.SIGABRT
    line, _, stacks = stderr.partition("\n")
    assert line == (
        "error: it hangs: a function in C has held Python's lock for 2 seconds. The stacks of its "
        "threads follow. Go on."
    )
    assert " in fullmatch\n" in stacks


@pytest.mark.matrix
def test_a_process_that_is_stopped_is_not_ended_from_outside():
    assert run("""
with watching(seconds=0.5):
    with hang.step("a step"):
        pass
    time.sleep(0.4)
    subprocess.Popen(["sh", "-c", f"sleep 6; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)
""")[0] == 0


@pytest.mark.matrix
@pytest.mark.parametrize(("seconds", "code"), [(1.2, 0), (5, hang.HUNG)])
def test_auto_is_ten_times_the_longest_phase(seconds, code):
    assert run(f"""
with watching(seconds=None, least=0.4):
    with hang.step("a step"):
        time.sleep(0.3)
    time.sleep({seconds})
""")[0] == code


@pytest.mark.matrix
def test_0_is_never():
    assert run("""
with watching(seconds=0.0, least=0.1):
    with hang.step("a step"):
        pass
    time.sleep(1)
""")[0] == 0


def test_sigusr1_names_the_phase_even_while_the_main_thread_is_in_c():
    code, _, stderr = run("""
import threading
lock = threading.Lock()
lock.acquire()
with watching(seconds=0.0), hang.within("reading data"):
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
    subprocess.Popen(["sleep", "1"]).wait()
""")
    assert code == 0
    assert "\nSIGUSR1 after 0 seconds in reading data, in " in f"\n{stderr}"
    assert 'File "' in stderr


def test_sigusr1_ends_no_process_whose_other_threads_are_busy():
    """Stacks that change while they are read would end it."""
    code, _, stderr = run("""
import threading
def work(depth=0):
    return work(depth + 1) if depth < 30 else None
def works():
    while True:
        work()
def begins():
    while True:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
def ask():
    for _ in range(60):
        time.sleep(0.03)
        os.kill(os.getpid(), signal.SIGUSR1)
with watching(seconds=0.0), hang.within("reading data"):
    for busy in works, works, begins:
        threading.Thread(target=busy, daemon=True).start()
    threading.Thread(target=ask).start()
    subprocess.Popen(["sleep", "2.5"]).wait()
""")
    assert code == 0
    assert " in work\n" in stderr and stderr.count("SIGUSR1 after ") > 3


@pytest.mark.parametrize("seconds", [-1, True, "soon", None])
def test_a_timeout_that_is_none_is_refused(seconds):
    with pytest.raises(ValueError, match=r"seconds \("):
        towers.HangTimeout(seconds)
