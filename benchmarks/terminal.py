"""Draws docs/images/terminal.svg: a real run on a real terminal, which is killed and resumed.

    python benchmarks/terminal.py

The commands run on a pseudo-terminal; what they leave on its screen is the picture, in the colours
they chose. The terminal, pyte, comes with extra `docs`.
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
    "train", "--num_gpus=8 --batch_size=128 --epochs=2 --checkpoint_every=100",
    "The flags of the run that is killed.",
)
_KILLED_AT = flags.DEFINE_string(
    "killed_at", r"Epoch\s+2/2\s.*\] [23]\d\d/", "The run is killed once its screen shows this."
)
_OUT = flags.DEFINE_string("out", str(ROOT / "docs/images/terminal.svg"), "The picture.")

_COLUMNS, _LINES = 110, 60
_NAMES = {"brown": "yellow"}  # pyte's, of the same colour


class Terminal:
    """A terminal of 110 columns, whose screen stays as what ran there has left it."""

    def __init__(self, folder: Path) -> None:
        """Args: folder: where commands run."""
        self._folder = folder
        self._screen = pyte.Screen(_COLUMNS, _LINES)
        self._stream = pyte.ByteStream(self._screen)

    def run(self, command: str, until: str | None = None) -> None:
        """Runs a command to its end; it is killed once the screen shows the pattern `until`."""
        self._show(f"$ {command}\r\n")
        ours, theirs = pty.openpty()
        ioctl(theirs, TIOCSWINSZ, struct.pack("HHHH", _LINES, _COLUMNS, 0, 0))
        words = command.replace("python train.py", f"{sys.executable} {ROOT / 'train.py'}").split()
        with subprocess.Popen(
            words, cwd=self._folder, stdin=theirs, stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm-256color", "COLORTERM": "truecolor"},
        ) as process:
            os.close(theirs)
            while written := _read(ours):
                self._stream.feed(written)
                if until and process.poll() is None and self._shows(until):
                    process.send_signal(signal.SIGKILL)
        os.close(ours)
        if process.returncode == -signal.SIGKILL:
            self._show("\x1b[0m\x1b[?25h\r\nKilled\r\n")
        elif process.returncode:
            raise RuntimeError(f"{command} ended with exit code {process.returncode}")
        self._show("\r\n")

    def picture(self) -> str:
        """The screen as SVG, without fonts from elsewhere."""
        lines = [self._line(i) for i in range(_LINES)]
        while not lines[-1].plain.strip():
            lines.pop()
        console = Console(record=True, width=_COLUMNS, file=open(os.devnull, "w"))
        for line in lines:
            console.print(line, no_wrap=True, overflow="crop")
        form = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
        form = form.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
        return console.export_svg(title="towers", code_format=form, unique_id="terminal")

    def _show(self, text: str) -> None:
        self._stream.feed(text.encode())

    def _shows(self, pattern: str) -> bool:
        return any(re.search(pattern, line) for line in self._screen.display)

    def _line(self, index: int) -> Text:
        characters = [self._screen.buffer[index][column] for column in range(_COLUMNS)]
        line = Text()
        for style, alike in groupby(characters, key=_style):
            line.append("".join(character.data for character in alike), style)
        line.rstrip()
        return line


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # as Linux says that nobody writes there any more
        return b""


def _style(character: Any) -> Style:
    fg, bg = _color(character.fg), _color(character.bg)
    return Style(color=fg, bgcolor=bg, bold=character.bold, reverse=character.reverse)


def _color(name: str) -> str | None:
    if name == "default":
        return None
    return f"#{name}" if re.fullmatch("[0-9a-f]{6}", name) else _NAMES.get(name, name)


def draw(train: str, killed_at: str) -> str:
    """The picture of a run with these flags, killed once its screen shows a pattern."""
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder))
        terminal.run(f"python train.py {train}", until=killed_at)
        (run,) = Path(folder).glob("runs/*")
        terminal.run(f"python train.py --resume=runs/{run.name}")
        return terminal.picture()


def main(argv: list[str]) -> None:
    """Runs, and writes the picture."""
    del argv
    Path(_OUT.value).write_text(draw(_TRAIN.value, _KILLED_AT.value), encoding="utf-8")


if __name__ == "__main__":
    app.run(main)
