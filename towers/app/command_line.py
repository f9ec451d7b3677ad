"""The frame of a command: its flags, one `error:` line, its signals and its exit code."""

import dataclasses
import io
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging

from towers.app import fields
from towers.machine import places, signals
from towers.workers.cluster import LOST_WORKER, LostWorkerError
from towers.machine.places import LOST_DIRECTORY, LostDirectoryError
from towers.machine.terminal import CapturedStderr
from towers.machine.user_lines import line_of_error

flags.disclaim_key_flags()  # --help lists what a command's own module defines: also by this one

EXPERIMENTS = Path(__file__).with_name("experiments")  # flagfiles, which the package brings

# Exit codes; 0: done.
USER_MISTAKE, OTHER_FAILURE, INTERRUPTED, TERMINATED, HUNG_UP = 2, 1, 130, 143, 129
_COLORS = re.compile(r"\x1b\[[\d;]*m")  # Keras colors its errors, in a pipe, too


def parse_flags(argv: list[str], says: str | None = None) -> bool:
    """Fills flags.FLAGS; False where it was --help, which is now printed.

    Args:
        argv: the command and its arguments; its flags are defined already.
        says: what the help begins with; None: the main module's docstring.

    Raises:
        ValueError: a flag is unknown, a value has another type, something is no flag, a flagfile
            cannot be read, or the help cannot be written.
    """
    app.define_help_flags()
    sys.modules["__main__"].__doc__ = says or sys.modules["__main__"].__doc__  # absl prints that
    help = io.StringIO()
    try:
        with redirect_stdout(help):
            rest = flags.FLAGS(_with_experiments(argv))[1:]
    except flags.Error as error:
        raise ValueError(str(error).removeprefix("ERROR:: ")) from None
    except SystemExit:  # absl's way to end a --help, with 1
        _print_help(help.getvalue())
        return False
    if rest:
        raise ValueError(f"{rest[0]!r} is not a flag. Flags begin with --; see --help.")
    return True


def _with_experiments(argv: list[str]) -> list[str]:
    """The arguments, with the package's own files in the place of flagfiles that are none here."""
    found = list(argv)
    for i, word in enumerate(argv):
        flag, is_assigned, name = word.partition("=")
        if flag in ("--flagfile", "-flagfile"):
            if is_assigned:
                found[i] = f"{flag}={_flagfile(name)}"
            elif argv[i + 1:]:
                found[i + 1] = _flagfile(argv[i + 1])
    return found


def _flagfile(name: str) -> str:
    """The path of a flagfile: as it is; or of an experiment: "mnist_notebook_small".

    Raises:
        ValueError: there is neither, or the file is no UTF-8 text.
    """
    known = {path.stem: str(path) for path in EXPERIMENTS.glob("*.flags")}
    if not name or Path(name).expanduser().exists():
        _check_encoding(name)
        return name
    stem = name.removeprefix(f"{EXPERIMENTS.name}/").removesuffix(".flags")
    if stem in known:
        return known[stem]
    raise ValueError(
        f"--flagfile ({fields.shown(name)}) is neither a file nor one of the experiments: "
        f"{', '.join(sorted(known))}."
    )


def _check_encoding(name: str) -> None:
    """Raises ValueError for a flagfile that absl would read wrongly, or not at all."""
    with suppress(OSError):  # absl says why it cannot be read
        content = Path(name).expanduser().read_bytes()
        try:
            is_plain = not content.decode().startswith("\ufeff")
        except UnicodeDecodeError:
            is_plain = False
        if not is_plain:
            raise ValueError(
                f"--flagfile ({fields.shown(name)}) must be UTF-8 text without a byte-order mark. "
                "Save it again in that encoding."
            )


def _print_help(text: str) -> None:
    """Prints it as far as somebody reads it; raises ValueError where it cannot be written."""
    if sys.stdout is None:
        return
    try:
        print(text, end="", flush=True)
    except OSError as error:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # else Python fails at its exit, too
        if not isinstance(error, BrokenPipeError):
            raise ValueError(f"--help: stdout cannot be written: {error.strerror}.") from None


def define_fields(config: type, names: Collection[str] = ()) -> None:
    """Defines a flag for each field of a configuration, with the field's default and help.

    Args:
        config: a dataclass whose fields are declared by `fields`.
        names: of the fields; all without any.
    """
    for field in dataclasses.fields(config):
        if not names or field.name in names:
            help = re.sub(r"`(\w+)`", r"--\1", fields.help_of(config, field))
            _define_flag(fields.declared(field), field.name, field.default, help)


def _define_flag(says: fields.Declared, name: str, default: Any, help: str) -> None:
    if says.kind == "choice":
        flags.DEFINE_enum(name, default, says.words, help)
    elif says.kind in ("count", "number") and says.words:
        flags.DEFINE(_NumberOrWord(says.kind, *says.words), name, default, help)
    elif says.kind == "switch" and says.words:
        flags.DEFINE(
            _SwitchOrWord(*says.words), name, default, help, boolean=True, serializer=_AsWritten()
        )
    else:
        _DEFINE[says.kind](name, default, help)


_DEFINE: dict[str, Callable[..., Any]] = {
    "text": flags.DEFINE_string, "count": flags.DEFINE_integer, "number": flags.DEFINE_float,
    "switch": flags.DEFINE_boolean,
}


class _NumberOrWord(flags.ArgumentParser):
    """"8" -> 8, "auto" -> "auto"; of a "number" that is no "count" "0.5" -> 0.5."""

    def __init__(self, kind: str, word: str) -> None:
        self._kind, self._word = (int if kind == "count" else float), word
        self.syntactic_help = f"a {'whole ' if kind == 'count' else ''}number, or {word}"

    def parse(self, argument: Any) -> float | str:
        if argument == self._word or isinstance(argument, self._kind):
            return argument  # type: ignore[no-any-return]
        try:
            return self._kind(argument)
        except ValueError:
            raise ValueError(f"it must be {self.syntactic_help}") from None


class _SwitchOrWord(flags.BooleanParser):
    """"true" -> True, "warn" -> "warn"; --noNAME is False."""

    def __init__(self, word: str) -> None:
        self._word = word
        self.syntactic_help = f"true, false or {word}"

    def parse(self, argument: Any) -> bool | str:  # type: ignore[override]
        if argument == self._word:
            return self._word
        try:
            return super().parse(argument)
        except ValueError:
            raise ValueError(f"it must be {self.syntactic_help}") from None


class _AsWritten(flags.ArgumentSerializer):
    """True -> "true", "auto" -> "auto"; absl would write "true" for any word."""

    def serialize(self, value: Any) -> str:
        return str(value).lower()


def exit_code(command: Callable[[], None]) -> int:
    """Runs a command; says in one line how it failed, if it did.

    Args:
        command: raises ValueError for what the user can mend.
    """
    signal.signal(signal.SIGTERM, _raise_terminated)
    if signal.SIGHUP in signals.not_ignored():
        signal.signal(signal.SIGHUP, _raise_terminated)
    signals.show_stacks_on_request()
    prefix = places.prefix(places.here())
    try:
        command()
    except ValueError as error:
        if is_verbose():
            traceback.print_exc()
        show(f"error: {as_flags(prefix.sub('', ' '.join(str(error).split())))}", is_error=True)
        return USER_MISTAKE
    except LostWorkerError as error:
        show(f"error: {as_flags(prefix.sub('', str(error)))}", is_error=True)
        return LOST_WORKER
    except LostDirectoryError as error:
        show(f"error: {as_flags(prefix.sub('', str(error)))}", is_error=True)
        return LOST_DIRECTORY
    except Terminated as stop:
        show(f"stopped by {signal.Signals(stop.number).name}", is_error=True)
        return 128 + stop.number
    except KeyboardInterrupt:
        show("stopped by Ctrl-C", is_error=True)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return OTHER_FAILURE
    return 0


@contextmanager
def users_lines_named(captured: CapturedStderr | None) -> Iterator[None]:
    """Adds to a ValueError that came through the user's own code where, and where to read more.

    Args:
        captured: what is held back of libraries' messages; it gets the traceback. None: nothing is.
    """
    try:
        yield
    except ValueError as error:
        line = line_of_error(error)
        text = _COLORS.sub("", str(error)).rstrip(". ") or type(error).__name__
        if line is None or captured is None:
            raise
        logging.getLogger(__name__).error("%s", text, exc_info=error)
        where = f"stands in {captured.path}" if captured.path else "is shown with --verbosity=1"
        text = text if line in text else f"{line}: {text}"
        raise ValueError(f"{text}. The whole traceback {where}.") from error


def train_command() -> str:
    """The words that start train.py as this process was started, for a text to be typed."""
    started = Path(sys.argv[0])
    if started == Path(__file__).parents[1] / "__main__.py":
        return "python -m towers"
    return started.name if started.name == "towers-train" else "python train.py"


def as_flags(text: str) -> str:
    """A library's error text, with the command as it was started and arguments as its flags.

    "num_gpus (8) is too many, use num_gpus=2" -> "--num_gpus (8) is too many, use --num_gpus=2".
    An argument without a value stands in backquotes: "leave `plan` out" -> "leave --plan out".
    """
    text = text.replace("python train.py", train_command())
    names = "|".join(map(re.escape, flags.FLAGS))
    text = re.sub(rf"`({names})`", r"--\1", text)
    return re.sub(rf"(?<!\S)({names})(?= \(|=)", r"--\1", text)


def is_verbose() -> bool:
    """Whether --verbosity asks for more than warnings."""
    return absl_logging.get_verbosity() > absl_logging.WARNING


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP; like Ctrl-C it must reach `exit_code` past every `except Exception`."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number = number


def _raise_terminated(number: int, frame: Any) -> NoReturn:
    if number == signal.SIGHUP:  # of one closed terminal, the shell and the system both tell
        signal.signal(number, signal.SIG_IGN)
    raise Terminated(number)


def show(line: str, is_error: bool = False) -> None:
    """Prints a line at once; continues if nobody reads stdout or stderr any more."""
    name = "stderr" if is_error else "stdout"
    try:
        print(line, file=getattr(sys, name), flush=True)
    except OSError:  # Python would fail at its exit to flush what it holds
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
