"""The frame of a command: its flags, one `error:` line, its signals and its exit code."""

import logging
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from absl import app, flags
from absl import logging as absl_logging

from towers.levels.lines import line_of_error
from towers.machine.cluster import LOST_WORKER, LostWorkerError
from towers.machine.terminal import Noise

# Exit codes; 0: done.
USER_MISTAKE, OTHER_FAILURE, INTERRUPTED, TERMINATED = 2, 1, 130, 143


def parse_flags(argv: list[str]) -> bool:
    """Fills flags.FLAGS; False where it was --help, which is now printed.

    Args:
        argv: the command and its arguments; its flags are defined already.

    Raises:
        ValueError: a flag is unknown, a value has another type, or something is no flag.
    """
    app.define_help_flags()
    try:
        rest = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        raise ValueError(str(error).removeprefix("ERROR:: ")) from None
    except SystemExit:  # absl's way to end a --help, with 1
        return False
    if rest:
        raise ValueError(f"{rest[0]!r} is not a flag. Flags begin with --; see --help.")
    return True


def DEFINE_count_or_auto(name: str, default: int | str | None, help: str) -> None:
    """Defines a flag whose value is a whole number or "auto"."""
    flags.DEFINE(_CountOrAuto(), name, default, help)


class _CountOrAuto(flags.ArgumentParser):
    """"8" -> 8, "auto" -> "auto"."""

    syntactic_help = "a whole number, or auto"

    def parse(self, argument: Any) -> int | str:
        if argument == "auto" or isinstance(argument, int):
            return argument  # type: ignore[no-any-return]
        try:
            return int(argument)
        except ValueError:
            raise ValueError("it must be a whole number, or auto") from None


def exit_code(command: Callable[[], None]) -> int:
    """Runs a command; says in one line how it failed, if it did.

    Args:
        command: raises ValueError for what the user can mend.
    """
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        command()
    except ValueError as error:
        if is_verbose():
            traceback.print_exc()
        print("error:", as_flags(" ".join(str(error).split())), file=sys.stderr)
        return USER_MISTAKE
    except LostWorkerError as error:
        print("error:", as_flags(str(error)), file=sys.stderr)
        return LOST_WORKER
    except Terminated:
        print("stopped by SIGTERM", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return OTHER_FAILURE
    return 0


@contextmanager
def users_lines_named(noise: Noise | None, script: str) -> Iterator[None]:
    """Adds to a ValueError that came through the user's own code where, and where to read more.

    Args:
        noise: what is held back of libraries' messages; it gets the traceback. None: nothing is.
        script: the command's own file.
    """
    try:
        yield
    except ValueError as error:
        line = line_of_error(error, script)
        text = str(error).rstrip(". ") or type(error).__name__
        if line is None or noise is None:
            raise
        logging.getLogger(__name__).error("%s", text, exc_info=error)
        where = f"stands in {noise.path}" if noise.path else "is shown with --verbosity=1"
        text = text if line in text else f"{line}: {text}"
        raise ValueError(f"{text}. The whole traceback {where}.") from error


def as_flags(text: str) -> str:
    """A library's error text, its arguments named as the command line's flags.

    "num_gpus (8) is too many, use num_gpus=2" -> "--num_gpus (8) is too many, use --num_gpus=2".
    An argument without a value stands in backquotes: "leave `plan` out" -> "leave --plan out".
    """
    names = "|".join(map(re.escape, flags.FLAGS))
    text = re.sub(rf"`({names})`", r"--\1", text)
    return re.sub(rf"(?<!\S)({names})(?= \(|=)", r"--\1", text)


def is_verbose() -> bool:
    """Whether --verbosity asks for more than warnings."""
    return absl_logging.get_verbosity() > absl_logging.WARNING


class Terminated(KeyboardInterrupt):
    """SIGTERM; like Ctrl-C it must reach `exit_code` past everybody's `except Exception`."""


def _raise_terminated(signal_number: int, frame: Any) -> NoReturn:
    raise Terminated
