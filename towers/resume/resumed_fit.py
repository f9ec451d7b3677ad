"""`fit` with a towers.Resume among its callbacks: saved between steps, begun where it was.

    fit(initial_epoch=e)                 of the newest checkpoint
        on_train_begin                   the callbacks' own, and what they remembered
        on_epoch_begin                   the callbacks' own; in mid-epoch the variables once more
        steps that are done              pass, and nobody is told
        steps that are left              after some of them a checkpoint
        validation, on_epoch_end         the callbacks' own, and a checkpoint
"""

import inspect
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import keras

from towers.resume import remote_dir, run_dir
from towers.resume.checkpointer import Checkpointer
from towers.resume.optimizer_options import OPTIONS, compared
from towers.resume.train_state import TrainState
from towers.resume.read_through import Lines
from towers.machine import callback_internals, signals
from towers.workers.workers import Workers, join_workers
from towers.parallel.hang_timeout import HangTimeout
from towers.resume.resume import Resume, resume_among
from towers.resume.resumed_callbacks import ResumedCallbacks
from towers.resume.resumed_data import Data, Start, are_arrays, make_data, split_arrays
from towers.resume.stateful import Stateful

_FIT = "fit"  # in a checkpoint's state: what the fit was; train.py's checkpoints have none
_SEED = "seed"
_ITERATOR = "iterator"  # the state of data that have one
_DATA = ("x", "y", "sample_weight", "batch_size", "shuffle")


def fit_arguments(
    x: Any = None,
    y: Any = None,
    batch_size: Any = None,
    epochs: Any = 1,
    verbose: Any = "auto",
    callbacks: Any = None,
    validation_split: Any = 0.0,
    validation_data: Any = None,
    shuffle: Any = True,
    class_weight: Any = None,
    sample_weight: Any = None,
    initial_epoch: Any = 0,
    steps_per_epoch: Any = None,
    validation_steps: Any = None,
    validation_batch_size: Any = None,
    validation_freq: Any = 1,
) -> dict[str, Any]:
    """The arguments of a call of `keras.Model.fit` by their names, with the defaults of the others.

    Written out, as experiment trackers replace `keras.Model.fit` by functions of any arguments.
    """
    return dict(locals())


_CALLBACKS = list(inspect.signature(fit_arguments).parameters).index("callbacks")


def is_resumed(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `fit` has a Resume among its callbacks."""
    return resume_among(given_callbacks(args, kwargs)) is not None


def given_callbacks(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The callbacks of a call of `fit`."""
    return args[_CALLBACKS] if len(args) > _CALLBACKS else kwargs.get("callbacks")


def resumed_fit(
    model: keras.Model,
    fit: Callable[..., Any],
    arguments: Mapping[str, Any],
    *,
    identity: Mapping[str, Any],
    prepare: Callable[[Any], Sequence[keras.Variable]],
) -> Any:
    """Runs `fit`; returns its history with the epochs of all processes.

    Args:
        model: a compiled parallel model.
        fit: Keras' own, of that model.
        arguments: of the call, see `fit_arguments`; a Resume is among the callbacks.
        identity: of the towers: plain values that must not differ in a fit that goes on.
        prepare: makes all variables for the specs of a batch; returns what else a step of the
            model's own has read.

    Raises:
        ValueError: the directory holds another fit, or cannot be used.
    """
    resume = resume_among(arguments["callbacks"])
    assert resume is not None
    workers = Workers(join_workers())
    is_chief = workers.cluster.is_chief  # the others may not see its disk
    arguments = _with_split(arguments)
    _check_callbacks(arguments["callbacks"])
    others = [
        c for c in keras.tree.flatten(arguments["callbacks"])
        if not isinstance(c, Resume | HangTimeout)  # a fit may go on with another timeout
    ]
    with (
        remote_dir.mirrored(
            str(resume.directory) if is_chief else None, _warn, is_new=False,
            argument="directory",
        ) as mirror,
        run_dir.locked(mirror.copy if mirror else resume.directory, "directory")
        if is_chief else nullcontext(),
        signals.deferred() as pending,
        compared(vars(model)) as options,
    ):
        checkpointer = Checkpointer(
            mirror.copy if mirror else resume.directory, workers, _warn,
            every=resume.every, argument="directory", mirror=mirror,
        )
        then, train_state = _read(checkpointer, resume.directory)
        seed = random.getrandbits(31)  # drawn each time, so that all go on with the same state
        start = _start(
            then, int(workers.broadcast(b"%d" % seed)), train_state, arguments,
            model.steps_per_execution,
        )
        data = make_data(
            start, **{name: arguments[name] for name in _DATA}, done=lambda: train_state.step,
            saved=checkpointer.found and checkpointer.found.checkpoint.state.get(_ITERATOR),
        )
        _check_executions(train_state, data, model.steps_per_execution)
        variables = _variables(model, prepare(data.spec))
        now = {
            **identity, **data.identity, "steps_per_epoch": arguments["steps_per_epoch"],
            "optimizer": type(model.optimizer).__name__, _SEED: start.seed,
        }
        held: dict[str, Any] = {_FIT: now, OPTIONS: options}
        if isinstance(data, Stateful):
            held[_ITERATOR] = lambda _: data.state()
        checkpointer.hold(lambda: variables, others, held)
        if then is not None:
            checkpointer.check_identity(
                then, now, "fit", " Start as then, or name another directory."
            )
            checkpointer.check_options(
                options, "fit", "Compile the model as then, or name another directory."
            )
        checkpointer.restore()
        with closing(checkpointer):
            callbacks = ResumedCallbacks(
                others, resume.directory, checkpointer, train_state, data, pending, workers,
                **_options(arguments), model=model,
                steps=arguments["steps_per_epoch"] or data.num_batches,
            )
            return _fit(model, fit, arguments, data, callbacks, pending)


def _check_callbacks(callbacks: Any) -> None:
    """Raises ValueError where another callback brings the fit back, too."""
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            raise ValueError(
                "callbacks: towers.Resume and keras.callbacks.BackupAndRestore both bring a fit "
                "back to where it was, and steps would be left out between them. Leave "
                "BackupAndRestore out: towers.Resume saves all that it does, and more often."
            )


def _read(
    checkpointer: Checkpointer, directory: Path
) -> tuple[dict[str, Any] | None, TrainState]:
    """The newest checkpoint's identity, None where there is none, and where it stands.

    Raises:
        ValueError: all checkpoints are damaged, or they are of something else.
    """
    found = checkpointer.read()
    if found is None:
        return None, TrainState()
    for line in found.damaged:
        _warn(line)
    state = found.checkpoint.state
    if _FIT not in state:
        raise ValueError(
            f"directory ({directory}) holds the checkpoints of a run of train.py. Name another."
        )
    with checkpointer.expecting("a fit"):
        then = {**state[_FIT], _SEED: int(state[_FIT][_SEED])}
        train_state = TrainState.from_json(state["position"])
    return then, train_state


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _fit(
    model: keras.Model,
    fit: Callable[..., Any],
    arguments: Mapping[str, Any],
    data: Data,
    callbacks: ResumedCallbacks,
    pending: signals.Pending,
) -> Any:
    """Keras' own fit, with a train function that passes over what is done."""
    model.make_train_function()
    function = model.train_function
    unread = data.skipped

    def train(iterator: Any) -> Any:
        nonlocal unread
        if unread:
            _read_again(iterator, unread, pending)
            unread = 0
        if not callbacks.is_done:
            return function(iterator)
        for _ in range(model.steps_per_execution):
            next(iterator, None)
        return dict(callbacks.train_state.logs)

    callback_internals.forget_initial_epoch(model)
    state = callbacks.train_state
    is_over = state.stopped and state.epoch_step == 0  # else the epoch has its end left
    model.train_function = train
    try:
        return fit(**{
            **arguments, "x": data.x, "y": None, "sample_weight": None, "shuffle": False,
            "callbacks": callbacks,
            "initial_epoch": arguments["epochs"] if is_over else state.epoch,
        })
    finally:
        if model.train_function is train:
            model.train_function = function


def _read_again(iterator: Any, num_batches: int, pending: signals.Pending) -> None:
    """Reads batches that are done; a signal ends that at once.

    Raises:
        ValueError: there are fewer.
    """
    lines = Lines("reading again the batches of the epochs that are done")
    with pending.at_once():
        for index in range(num_batches):
            if next(iterator, None) is None:
                raise ValueError(f"x ends after {index} batches, and the fit has done more.")
            lines.show(index + 1)


def _with_split(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the validation data that `validation_split` takes from arrays."""
    share = arguments["validation_split"]
    is_split = share and arguments["validation_data"] is None and are_arrays(arguments["x"])
    if not is_split:
        return dict(arguments)
    names = ("x", "y", "sample_weight")
    train, validation = split_arrays(tuple(arguments[name] for name in names), share)
    return {
        **arguments, **dict(zip(names, train, strict=True)),
        "validation_data": validation, "validation_split": 0.0,
    }


def _start(
    then: Mapping[str, Any] | None, seed: int, state: TrainState, arguments: Mapping[str, Any],
    execution: int,
) -> Start:
    """The Start of the data; `seed`: of their order, in a fit that begins."""
    steps, first = arguments["steps_per_epoch"], arguments["initial_epoch"]
    if then is None:
        state.epoch = first
    return Start(
        seed if then is None else then[_SEED], first, state.epoch, state.epoch_step,
        -(-steps // execution) * execution if steps else None,
    )


def _check_executions(state: TrainState, data: Data, execution: int) -> None:
    """Raises ValueError where the newest checkpoint lies within an execution of several steps."""
    step = state.epoch_step
    if step % execution and step != data.most_steps:
        raise ValueError(
            f"steps_per_execution ({execution}): the newest checkpoint was written after step "
            f"{step} of its epoch, in the middle of an execution. Go on with one that divides it."
        )


def _variables(
    model: keras.Model, own: Sequence[keras.Variable]
) -> dict[str, list[keras.Variable]]:
    """All that the next steps depend on, each variable once."""
    optimizer = getattr(model, "optimizer", None)
    groups: dict[str, Sequence[keras.Variable]] = {
        "model": model.variables,
        "optimizer": optimizer.variables if optimizer else [],
        "metrics": model.metrics_variables,
        "step": own,
    }
    seen: set[int] = set()
    once: dict[str, list[keras.Variable]] = {}
    for name, variables in groups.items():
        once[name] = [v for v in {id(v): v for v in variables}.values() if id(v) not in seen]
        seen |= set(map(id, once[name]))
    return once


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The options that Keras' fit gives its list of callbacks."""
    verbose = arguments["verbose"]
    return {"add_progbar": verbose != 0, "verbose": verbose, "epochs": arguments["epochs"]}
