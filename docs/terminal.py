"""Draws docs/images/terminal.svg: a real run in a terminal, which is killed and resumed.

    python docs/terminal.py

The commands run on a pseudo-terminal. The picture is its screen after the last command, in the
commands' own colors. It needs `pip install -e '.[docs]'`, which includes the terminal pyte.
"""

import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
from fcntl import ioctl
from itertools import groupby
from pathlib import Path
from termios import TIOCSWINSZ
from typing import Any

import pyte
from absl import app, flags
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.style import Style
from rich.text import Text

ROOT = Path(__file__).parents[1]

_TRAIN = flags.DEFINE_string(
    "train",
    "--num_gpus=8 --batch_size=128 --epochs=2 --checkpoint_every=100",
    "Flags of the run that is killed.",
)
_KILL_AT = flags.DEFINE_string(
    "kill_at",
    r"Epoch\s+2/2\s.*\] [23]\d\d/",
    "Kill the run once a line of its screen matches this regular expression.",
)
_OUT = flags.DEFINE_string("out", str(ROOT / "docs/images/terminal.svg"), "SVG to write.")

COLUMNS, LINES = 110, 60


class Terminal:
    """A terminal that keeps its screen from one command to the next."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: working directory of the commands."""
        self._folder = folder
        self._screen = pyte.Screen(COLUMNS, LINES)
        self._stream = pyte.ByteStream(self._screen)

    def run(self, command: str, kill_at: str | None = None) -> None:
        """Runs a command to its end, or kills it once a line of the screen matches `kill_at`."""
        self._show(f"$ {command}\r\n")
        ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
        words = command.replace("python train.py", f"{sys.executable} {ROOT / 'train.py'}").split()
        with subprocess.Popen(
            words,
            cwd=self._folder,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        ) as process:
            os.close(theirs)
            while written := _read(ours):
                self._stream.feed(written)
                if kill_at and process.poll() is None and self._matches(kill_at):
                    process.send_signal(signal.SIGKILL)
        os.close(ours)
        if process.returncode == -signal.SIGKILL:
            self._show("\x1b[0m\x1b[?25h\r\nKilled\r\n")
        elif process.returncode:
            raise RuntimeError(f"{command} ended with exit code {process.returncode}")
        self._show("\r\n")

    def export_svg(self) -> str:
        """Returns the screen as SVG. It loads no fonts from other hosts."""
        lines = [self._line(i) for i in range(LINES)]
        while not lines[-1].plain.strip():
            lines.pop()
        console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))
        for line in lines:
            console.print(line, no_wrap=True, overflow="crop")
        form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        form = form.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
        return console.export_svg(title="towers", code_format=form, unique_id="terminal")

    def _show(self, text: str) -> None:
        self._stream.feed(text.encode())

    def _matches(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self._screen.display)

    def _line(self, index: int) -> Text:
        characters = [self._screen.buffer[index][column] for column in range(COLUMNS)]
        line = Text()
        for style, group in groupby(characters, key=_style):
            line.append("".join(character.data for character in group), style)
        line.rstrip()
        return line


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux raises it once no process has the other end open
        return b""


def _style(character: Any) -> Style:
    fg, bg = _color(character.fg), _color(character.bg)
    return Style(color=fg, bgcolor=bg, bold=character.bold, reverse=character.reverse)


def _color(name: str) -> str | None:
    """Converts a color of pyte, such as "default", "brown" or "0072b2", to one of rich."""
    if name == "default":
        return None
    if re.fullmatch("[0-9a-f]{6}", name):
        return f"#{name}"
    return "yellow" if name == "brown" else name


def draw(train: str, kill_at: str) -> str:
    """Returns the picture of a run with the flags `train`, which is killed and resumed."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder))
        terminal.run(f"python train.py {train}", kill_at)
        (run,) = Path(folder).glob("runs/*")
        terminal.run(f"python train.py --resume=runs/{run.name}")
        return terminal.export_svg()


def main(argv: list[str]) -> None:
    """Writes the picture."""
    del argv
    Path(_OUT.value).write_text(draw(_TRAIN.value, _KILL_AT.value), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
