"""A worker's process: what it says, how it ends; played by small scripts."""

import fcntl
import os
import pty
import selectors
import struct
import subprocess
import sys
import termios
import time
import tty
from pathlib import Path

import pytest

from tests.processes import has_ended

ROOT = Path(__file__).parents[3]

# Runs one worker to its end, in a process without threads, and says how it ended.
PROGRAM = """
import os, selectors, sys, time
from towers.app.launch.screen import Screen
from towers.app.launch.worker import Worker

index, script, action = int(sys.argv[1]), sys.argv[2], sys.argv[3]
worker = Worker(index, [sys.executable, "-c", script], dict(os.environ), Screen())
with selectors.DefaultSelector() as selector:
    for source in worker.sources:
        selector.register(source, selectors.EVENT_READ)
    until = time.monotonic() + 20
    while not worker.has_ended() and time.monotonic() < until:
        for key, _ in selector.select(0.02):
            if not worker.read(key.fd):
                selector.unregister(key.fd)
        worker.show_overdue()
        worker.fit_terminal()
        if os.path.exists("ready"):
            exec(action)
    for source in worker.sources:
        if source in selector.get_map():
            selector.unregister(source)
worker.close()
print(worker.code, worker.told, worker.killed, worker.directory, worker.take_errors(), flush=True)
"""


def run(tmp_path, script, index=1, action="pass", stdout=subprocess.PIPE, **environment):
    """(stdout's lines, the last line of all, stderr) of PROGRAM."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(index), script, action], cwd=tmp_path, text=True,
        stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    *lines, last = (done.stdout or "\n").splitlines()
    return lines, last, done.stderr


SPEAKS = """
import sys
print("towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: runs/x")
print("careful", file=sys.stderr)
print("1/2\\r2/2")
print("no end", end="")
"""


def test_the_chiefs_lines_are_shown_as_they_are(tmp_path):
    lines, last, stderr = run(tmp_path, SPEAKS, index=0)
    assert lines == [  # of 1/2 and 2/2, a return between them is a line's end to `splitlines`
        "towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: runs/x", "1/2", "2/2", "no end",
    ]
    assert (last, stderr) == ("0 False False runs/x []", "careful\n")


def test_the_others_lines_say_whose_they_are(tmp_path):
    lines, last, stderr = run(tmp_path, SPEAKS)
    title = "towers 0.1 | TensorFlow 2.21, Keras 3.15 | run: runs/x"
    assert lines == [f"[worker 1] {title}", "[worker 1] 2/2", "[worker 1] no end"]
    assert (last, stderr) == ("0 False False None []", "[worker 1] careful\n")


def test_an_error_is_kept_for_who_knows_whether_it_was_the_first(tmp_path):
    script = "import sys\nprint('before', file=sys.stderr)\nsys.exit('error: wrong.')"
    lines, last, stderr = run(tmp_path, script)
    assert (last, stderr) == ("1 False False None [b'error: wrong.']", "[worker 1] before\n")


@pytest.mark.parametrize("script, code", [
    ("import os; os.kill(os.getpid(), 9)", -9), ("raise SystemExit(3)", 3),
])
def test_its_end_is_its_exit_code_or_the_signal(script, code, tmp_path):
    assert run(tmp_path, script)[1].startswith(f"{code} False False")


WAITS = """
import signal, sys, time
def saved(number, frame):
    print("saved", number)
    sys.exit(143)
signal.signal(signal.SIGTERM, ACTION)
open("ready", "w")
time.sleep(30)
"""


def test_it_is_asked_to_end_only_once(tmp_path):
    lines, last, _ = run(
        tmp_path, WAITS.replace("ACTION", "saved"), action="worker.ask_to_end(15)"
    )
    assert (lines, last) == (["[worker 1] saved 15"], "143 True False None []")


def test_it_is_killed_with_all_that_it_has_started(tmp_path):
    child = "import subprocess, sys\n" \
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\n" \
        "print(child.pid, flush=True)\n"
    lines, last, _ = run(
        tmp_path, child + WAITS.replace("ACTION", "signal.SIG_IGN"), action="worker.kill()"
    )
    assert last == "-9 False True None []"
    assert has_ended(int(lines[0].split()[-1]))


def test_who_holds_its_pipe_open_after_its_end_is_not_waited_for(tmp_path):
    script = "import subprocess, sys\n" \
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(40)'])\nprint('done')"
    begun = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "1", script, "pass"], cwd=tmp_path, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE,
    )
    lines = [process.stdout.readline() for _ in range(2)]
    assert lines == ["[worker 1] done\n", "0 False False None []\n"]
    assert process.wait() == 0 and time.monotonic() - begun < 20
    process.stdout.close()


ON_A_TERMINAL = """
import os, sys, time
print(sys.stdout.isatty(), *os.get_terminal_size(1))
open("ready", "w")
print("Epoch 1 [=  ]", end="", flush=True)
while os.get_terminal_size(1).columns != 61:
    time.sleep(0.01)
print("\\rEpoch 1 [== ]", end="", flush=True)
"""


def test_on_a_terminal_the_chief_has_one_of_the_same_size(tmp_path):
    ours, its = pty.openpty()
    tty.setraw(its)
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 50, 0, 0))
    resize = "import fcntl, struct, termios\nfcntl.ioctl(1, termios.TIOCSWINSZ, " \
        "struct.pack('HHHH', 20, 61, 0, 0))"
    run(tmp_path, ON_A_TERMINAL, index=0, stdout=its, action=resize, TERM="xterm")
    os.close(its)
    shown, selector = b"", selectors.DefaultSelector()
    selector.register(ours, selectors.EVENT_READ)
    try:
        while selector.select(1):
            shown += os.read(ours, 1000)
    except OSError:
        pass  # the other side is closed, and all is read
    os.close(ours)
    assert shown == (
        b"True 50 20\nEpoch 1 [=  ]\rEpoch 1 [== ]\n\x1b[?25h0 False False None []\n"
    )
