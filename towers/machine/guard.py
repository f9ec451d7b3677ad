"""Ends the process that started it if its Python interpreter hangs; a program without towers.

Its argument is the remedy for the message. Each line of stdin holds the seconds that may pass
until the next line. A thread cannot do this, because it needs Python's lock, and
`faulthandler.dump_traceback_later` would count the time for which Ctrl-Z stops the process.
"""

import os
import select
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    watched, limit, waited = os.getppid(), float("inf"), 0
    while waited <= limit:
        if select.select([0], [], [], 1)[0]:
            lines = os.read(0, 1 << 16).split()
            if not lines:  # the watch, or the process, has ended
                sys.exit()
            limit, waited = float(lines[-1]), 0
        elif Path(f"/proc/{watched}/stat").read_text().rpartition(")")[2].split()[0] not in "Tt":
            waited += 1  # the process is not stopped
    text = (
        "error: it hangs: a function in C holds Python's lock. The stacks of its threads follow. "
        f"{sys.argv[1]}\n"
    )
    os.write(2, text.encode())
    os.kill(watched, signal.SIGABRT)
