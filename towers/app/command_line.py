"""Handles flags, --help, signals and exit codes of all commands, and prints errors as one line."""

import dataclasses
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

from absl import flags, logging as absl_logging

import towers
from towers.app import completion, fields
from towers.machine import places, signals
from towers.machine.places import LOST_DIRECTORY, LostDirectoryError
from towers.machine.terminal import CapturedStderr
from towers.machine.user_lines import line_of_error
from towers.machine.words import printable
from towers.workers.cluster import LOST_WORKER, LostWorkerError

MOST_USED = (
    "model dataset data_dir epochs batch_size num_gpus num_towers optimizer learning_rate run_dir "
    "resume seed"
).split()
GROUPS = {  # NAME in --help=NAME -> (title, flags)
    name: (title, members.split())
    for name, title, members in (
        ("model", "Model", "model init_from freeze precision"),
        (
            "data",
            "Data",
            "dataset data_dir image_size data_workers shuffle_buffer augment class_weight",
        ),
        (
            "optimization",
            "Optimization",
            "epochs max_steps fast_dev_run batch_size batch_size_per_gpu optimizer "
            "learning_rate schedule warmup_steps weight_decay momentum clip_norm ema "
            "batch_norm nonfinite seed early_stopping",
        ),
        (
            "devices",
            "Devices and workers",
            "num_gpus num_towers accumulate logical_gpus device "
            "towers_per_device variable_device strategy add_on gpus_per_tower "
            "stages jit_compile cpu_threads deterministic worker_timeout devices plan",
        ),
        (
            "saving",
            "Saving and resuming",
            "run_dir resume trust_run_dir checkpoint_every "
            "keep_checkpoints hang_timeout keep_best monitor monitor_mode callbacks",
        ),
        (
            "reports",
            "Reports",
            "runs tensorboard ledger confusion_matrix noise_scale price profile verify_gradients",
        ),
        ("after", "After training", "evaluate predict out export replay at audit epoch"),
    )
}


def asked_for(argv: list[str]) -> str | None:
    """Returns NAME of `--help=NAME`, "" for `--help`, or None if the arguments have neither."""
    for word in argv[1:]:
        name, _, group = word.lstrip("-").partition("=")
        if word.startswith("-") and name in ("help", "h", "helpshort", "helpfull"):
            return group
    return None


def help_text(introduction: str, group: str = "") -> str:
    """Returns the help of this process' command, for all flags or for one key of `GROUPS`."""

    def lines(names: Iterable[str]) -> str:
        listed = flags.FlagValues()
        for name in names:
            listed[name] = own[name]
        return listed.get_help("  ", include_special_flags=False)

    own = {flag.name: flag for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])}
    groups = {
        name: (title, listed)
        for name, (title, members) in GROUPS.items()
        if (listed := [flag for flag in members if flag in own])
    }
    if group:
        if group not in groups:
            raise ValueError(f"--help ({group}) must be one of {', '.join(groups)}.")
        title, listed = groups[group]
        return f"{title}:\n{lines(listed)}"
    most_used = MOST_USED if own.keys() >= set(MOST_USED) else []
    known = {name for _, listed in groups.values() for name in listed}
    sections = [("Most used", most_used), ("This command", own.keys() - known)] + [
        (f"{title} (--help={name})", [flag for flag in listed if flag not in most_used])
        for name, (title, listed) in groups.items()
    ]
    return "\n\n".join(
        [
            introduction.strip(),
            *(f"{title}:\n{lines(listed)}" for title, listed in sections if listed),
            "Every command: --flagfile=FILE reads flags from a file, or a documented experiment by "
            "its\nname. --version prints the version. --verbosity=1 shows the messages of libraries, "
            "and a\ntraceback with each error. --completion prints a script by which bash and zsh "
            'complete\nflags: eval "$(towers-train --completion)".',
        ]
    )


flags.disclaim_key_flags()  # flags defined here count as the command's, which --help lists

# Exit codes; 0: done.
USER_MISTAKE, OTHER_FAILURE, INTERRUPTED, TERMINATED, HUNG_UP = 2, 1, 130, 143, 129
_COLORS = re.compile(r"\x1b\[[\d;]*m")  # Keras colors its errors even in a pipe
_FLAGFILE = ("--flagfile", "-flagfile")
_PARSERS: dict[str, Callable[[], flags.ArgumentParser]] = {
    "text": flags.ArgumentParser,
    "count": flags.IntegerParser,
    "number": flags.FloatParser,
    "switch": flags.BooleanParser,
}


def parse_flags(argv: list[str], introduction: str = "") -> bool:
    """Fills flags.FLAGS. For --help, --version and --completion, prints the text and returns False."""
    if {"--version", "-version"} & set(argv[1:]):
        show(f"towers {towers.__version__}")
        return False
    if "--completion" in argv[1:]:
        show(completion.script())
        return False
    group = asked_for(argv)
    if group is not None:
        show(help_text(introduction, group))
        return False
    try:
        rest = flags.FLAGS(with_experiments(argv))[1:]
    except flags.Error as error:
        raise ValueError(str(error).removeprefix("ERROR:: ")) from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--flagfile: the file must be UTF-8 text: {error}.") from None
    if rest:
        raise ValueError(f"{rest[0]!r} is not a flag. Flags begin with --; see --help.")
    return True


def with_experiments(argv: list[str]) -> list[str]:
    """Replaces the name of a documented experiment in --flagfile=NAME by the path of its file.

    NAME, NAME.flags and the path in a checkout are names, unless there is such a file.
    """
    folder, found = Path(__file__).with_name("experiments"), []
    for word in argv:
        option, _, given = word.partition("=")
        path = folder / f"{Path(given).name.removesuffix('.flags')}.flags"
        is_name = Path(given).parent in (Path(), Path("towers/app/experiments"))
        if option in _FLAGFILE and is_name and not os.path.exists(given) and path.exists():
            word = f"{option}={path}"
        found.append(word)
    return found


def define_fields(config: type, names: Collection[str] = ()) -> None:
    """Defines a flag for each field of a configuration, or only for the fields in `names`."""
    for field in dataclasses.fields(config):
        if names and field.name not in names:
            continue
        says, default = fields.declared(field), cast(Any, field.default)
        text = re.sub(r"`(\w+)`", r"--\1", fields.help_of(config, field))
        if says.kind == "choice":
            flags.DEFINE_enum(field.name, default, says.words, text)
            flags.FLAGS[field.name].parser = _Choice(says.words, says.refused)
            continue
        flags.DEFINE(
            _OrWord(_PARSERS[says.kind](), says.words),
            field.name,
            default,
            text,
            serializer=_AsWritten(),
            boolean=says.kind == "switch",
        )


class _OrWord(flags.ArgumentParser):
    """Keeps one of `words`, such as "auto" or "warn", and parses any other text by `parser`."""

    def __init__(self, parser: flags.ArgumentParser, words: Collection[str]) -> None:
        self._parser, self._words = parser, words
        self.syntactic_help = parser.syntactic_help

    def parse(self, argument: Any) -> object:
        try:
            return argument if argument in self._words else self._parser.parse(argument)
        except (TypeError, ValueError) as error:
            forms = [self.syntactic_help or "true or false", *self._words]
            raise ValueError(f"it must be {', or '.join(forms)}") from error


class _Choice(flags.EnumParser):
    """Parses one of `words`, and leaves `refused` words to the configuration."""

    def __init__(self, words: Sequence[str], refused: Collection[str]) -> None:
        super().__init__(words)
        self._refused = refused

    def parse(self, argument: str) -> str:
        return argument if argument in self._refused else str(super().parse(argument))


class _AsWritten(flags.ArgumentSerializer):
    """Writes True as "true" and "auto" as "auto"; absl would write "true" for "auto", too."""

    def serialize(self, value: object) -> str:
        return str(value).lower() if isinstance(value, bool) else str(value)


def exit_code(command: Callable[[], int | None]) -> int:
    """Runs a command and returns its exit code; errors that a user can fix print as one line."""

    def raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
        if number == signal.SIGHUP:  # the shell and the system both send one for a closed terminal
            signal.signal(number, signal.SIG_IGN)
        raise Terminated(number)

    signal.signal(signal.SIGTERM, raise_terminated)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, raise_terminated)
    signals.show_stacks_on_request()
    prefix = places.prefix(places.here())
    try:
        return command() or 0
    except (ValueError, LostWorkerError, LostDirectoryError) as error:
        if is_verbose():
            show_traceback()
        text = as_flags(prefix.sub("", " ".join(str(error).split())))
        show(f"error: {text}", is_error=True)
        if isinstance(error, LostWorkerError):
            return LOST_WORKER
        return LOST_DIRECTORY if isinstance(error, LostDirectoryError) else USER_MISTAKE
    except Terminated as stop:
        show(f"stopped by {signal.Signals(stop.number).name}", is_error=True)
        return 128 + stop.number
    except KeyboardInterrupt:
        show("stopped by Ctrl-C", is_error=True)
        return INTERRUPTED
    except Exception:
        show_traceback()
        return OTHER_FAILURE


@contextmanager
def users_lines_named(captured: CapturedStderr | None) -> Iterator[None]:
    """Adds the line of user code to a ValueError raised there; the traceback goes to `captured`."""
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
    """Returns the command that starts train.py in the way in which this process was started."""
    started = Path(sys.argv[0])
    if started == Path(__file__).parents[1] / "__main__.py":
        return "python -m towers"
    return started.name if started.name == "towers-train" else "python train.py"


def as_flags(text: str) -> str:
    """Rewrites an error of the library for the command line: arguments become flags.

    "num_gpus (8) is too many, use num_gpus=2" -> "--num_gpus (8) is too many, use --num_gpus=2".
    An argument without a value is in backquotes: "leave `plan` out" -> "leave --plan out".
    """
    text = text.replace("python train.py", train_command())
    names = "|".join(map(re.escape, flags.FLAGS))
    text = re.sub(rf"`({names})`", r"--\1", text)
    return re.sub(rf"(?<!\S)({names})(?= \(|=)", r"--\1", text)


def is_verbose() -> bool:
    """Returns whether --verbosity shows more than warnings."""
    return absl_logging.get_verbosity() > absl_logging.WARNING


class Terminated(KeyboardInterrupt):
    """Reports SIGTERM or SIGHUP to `exit_code`; like Ctrl-C, it passes `except Exception`."""

    def __init__(self, number: int = signal.SIGTERM) -> None:
        self.number = number


def show_traceback() -> None:
    """Prints the exception that is being handled, with its traceback."""
    show(traceback.format_exc().rstrip("\n"), is_error=True)


def show(text: str, is_error: bool = False) -> None:
    """Prints lines, in which a file's name may stand, without sequences that a terminal obeys."""
    pass_on(printable(text, kept="\n"), is_error)


def pass_on(text: str, is_error: bool = False) -> None:
    """Prints lines and flushes them; if stdout or stderr was closed, drops them and continues."""
    name = "stderr" if is_error else "stdout"
    try:
        print(text, file=getattr(sys, name), flush=True)
    except OSError:  # Python would fail when it flushes its buffer at exit
        setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
