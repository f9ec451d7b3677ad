"""Copies variables and the state of callbacks for a checkpoint, and restores them.

It also reads the options of optimizers, which must not differ in a resumed run.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from towers.divide.tower_step import TowerStep
from towers.machine.callback_internals import CALLBACK_FIELDS, says_averages
from towers.resume.checkpoints import json_copy
from towers.resume.stateful import Json
from towers.resume.train_state import plain
from towers.resume.unsaved import Watched

State: TypeAlias = dict[str, Any]  # of a callback, as JSON values
OPTIONS, FULL_BATCH = "options", "full batch"  # in a checkpoint's state

# For each optimizer: the options that the script gave it, and those at the end of the last run.
_seen: WeakKeyDictionary = WeakKeyDictionary()


@contextmanager
def compared(optimizers: Mapping[str, object]) -> Iterator[dict[str, Json]]:
    """Gives a fit the options of the script, {"optimizer.learning_rate": 0.001, ...}.

    Callbacks may change the learning rate during the fit. If a later fit uses the same optimizer
    object, the options are still the script's, unless the script has changed them. Values of
    `optimizers` that are not optimizers are ignored.
    """
    named = {n: o for n, o in optimizers.items() if isinstance(o, keras.optimizers.Optimizer)}
    told: dict[str, dict[str, Json]] = {}
    for name, optimizer in named.items():
        now = _options(optimizer)
        before, left = _seen.get(optimizer, (now, now))
        told[name] = before if now == left else now
    try:
        yield {f"{name}.{key}": v for name, options in told.items() for key, v in options.items()}
    finally:
        for name, optimizer in named.items():
            _seen[optimizer] = told[name], _options(optimizer)


def _options(optimizer: keras.optimizers.Optimizer) -> dict[str, Json]:
    """Returns the flat arguments of an optimizer; {} if its get_config() fails."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about lambdas, which are left out
            return dict(_flat(keras.saving.serialize_keras_object(optimizer)["config"], ""))
    except Exception:  # a custom get_config() may raise anything
        return {}


def _flat(config: Mapping[str, object], prefix: str) -> Iterator[tuple[str, Json]]:
    """Yields ("learning_rate", "CosineDecay"), ("learning_rate.decay_steps", 100) and so on.

    Names are left out because they count the objects of a process. Values must be JSON.
    """
    for name, value in config.items():
        if name == "name":
            continue
        if isinstance(value, dict) and "class_name" in value:
            kind, value = value["class_name"], value["config"]
            if kind == "__lambda__":
                continue
            if isinstance(value, dict):
                yield f"{prefix}{name}", kind
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
            continue
        if isinstance(value, float):
            value = float(f"{value:.7g}")  # 0.1, not float32's 0.10000000149
        with suppress(ValueError):
            yield f"{prefix}{name}", json_copy(value)


_WAIT, _STOPPED_EPOCH = "wait", "stopped_epoch"  # attributes of EarlyStopping
# The attributes in which Keras' callbacks keep state from epoch to epoch, or from batch to batch.
_CALLBACK_FIELDS = (
    "best",
    _WAIT,
    "best_epoch",
    _STOPPED_EPOCH,
    "cooldown_counter",
    *CALLBACK_FIELDS,
)
_BEST_WEIGHTS = "best_weights"
_CLASS = "class"  # the class of the callback that a state belongs to
_ROWS, _KEYS = "rows", "keys"  # the state of a CSVLogger
_UNSAVED = "unsaved"  # replaces the state of a callback that is not JSON


def variables_of(step: TowerStep) -> dict[str, Sequence[keras.Variable]]:
    """Returns all variables of a step by group. The model's variables include random seeds."""
    return {
        "model": step.model.variables,
        "optimizer": step.optimizer.variables,
        "metrics": step.metrics_variables,
    }


def copy_arrays(groups: Mapping[str, Sequence[keras.Variable]]) -> dict[str, np.ndarray]:
    """Copies the variables of each group to the host, keyed "group/index/path"."""
    return {
        f"{group}/{i}/{variable.path}": np.asarray(variable.value.numpy())
        for group, variables in groups.items()
        for i, variable in enumerate(variables)
    }


def assign_arrays(
    groups: Mapping[str, Sequence[keras.Variable]], arrays: dict[str, np.ndarray], path: Path
) -> None:
    """Assigns the arrays from `copy_arrays` to the variables; if one differs, to none.

    Variables are matched by order, because their paths count earlier models of the process.
    """
    pairs: list[tuple[keras.Variable, np.ndarray]] = []
    for group, variables in groups.items():
        saved = {k: v for k, v in arrays.items() if k.startswith(f"{group}/")}
        for variable, (name, value) in zip(variables, saved.items(), strict=False):
            if _kind(value) != _kind(variable):
                raise ValueError(
                    f"{path} holds another {group}: here {variable.path} is {_kind(variable)}, "
                    f"in the checkpoint {name.split('/', 2)[-1]} {_kind(value)}."
                )
            pairs.append((variable, value))
        if len(saved) != len(variables):
            raise ValueError(
                f"{path} holds another {group}: here {len(variables)} variables, in the "
                f"checkpoint {len(saved)}."
            )
    for variable, value in pairs:
        variable.assign(value)


def callbacks_arrays(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, np.ndarray]:
    """Copies the best weights that `EarlyStopping(restore_best_weights=True)` keeps."""
    arrays: dict[str, np.ndarray] = {}
    for i, callback in enumerate(callbacks):
        values = getattr(callback, _BEST_WEIGHTS, None)
        # In a custom callback, this attribute may hold something else.
        if isinstance(values, list) and all(isinstance(value, np.ndarray) for value in values):
            arrays |= {f"callbacks/{i}/{j}": value.copy() for j, value in enumerate(values)}
    return arrays


def callbacks_state(
    callbacks: Sequence[keras.callbacks.Callback], warn: Callable[[str], None]
) -> list[State]:
    """Copies each callback's state as JSON values; `warn` gets a line for a state that is not JSON.

    A custom callback has a state if it defines `get_state()` -> JSON values and `set_state(value)`.
    """
    return [{**_callback_state(c, warn), _CLASS: _class(c)} for c in callbacks]


def watch_callbacks(callbacks: Sequence[keras.callbacks.Callback]) -> list[Watched]:
    """Watches callbacks that do not say by two methods what their state is."""
    return [
        Watched(callback, (*_CALLBACK_FIELDS, _BEST_WEIGHTS))
        for callback in callbacks
        if not (hasattr(callback, "get_state") and hasattr(callback, "set_state"))
    ]


def _class(callback: keras.callbacks.Callback) -> str:
    """Returns the class of a callback. SwapEMAWeights has its argument, which must not change."""
    if isinstance(callback, keras.callbacks.SwapEMAWeights):
        return f"{type(callback).__name__}(swap_on_epoch={callback.swap_on_epoch})"
    return type(callback).__name__


def _callback_state(callback: keras.callbacks.Callback, warn: Callable[[str], None]) -> State:
    if hasattr(callback, "get_state"):
        state = {"get_state": callback.get_state()}
        if isinstance(callback, keras.callbacks.EarlyStopping):  # for `stops_again` alone
            state |= {name: getattr(callback, name) for name in (_WAIT, _STOPPED_EPOCH)}
    else:
        state = {
            name: getattr(callback, name) for name in _CALLBACK_FIELDS if hasattr(callback, name)
        }
        if isinstance(callback, keras.callbacks.CSVLogger):
            state |= {_KEYS: callback.keys, _ROWS: _rows(callback)}
    for name, value in state.items():
        try:
            state[name] = json_copy(value if name == "get_state" else plain(value))
        except ValueError as error:
            said = "get_state() returned" if name == "get_state" else f"its `{name}` holds"
            warn(
                f"callback {type(callback).__name__}: {said} a value that is not JSON "
                f"({error}). Checkpoints leave it out, and a resumed run starts it again. Return "
                "numbers, text, lists and dicts from get_state()."
            )
            return {_UNSAVED: True}
    return state


def restore_callbacks(
    callbacks: Sequence[keras.callbacks.Callback],
    states: Sequence[State],
    arrays: dict[str, np.ndarray],
    warn: Callable[[str], None],
) -> None:
    """Restores the results of `callbacks_state` and, from `arrays`, of `callbacks_arrays`.

    The k-th callback of a class gets the k-th saved state of this class; new callbacks keep their
    initial state. Calls `warn` with one line for each state that could not be saved.
    """
    pairs, left = _paired(callbacks, states)
    for callback, index in pairs:
        _restore(callback, states[index], arrays, f"callbacks/{index}/", warn)
    for state in left:
        if says_averages(state):
            raise ValueError(
                f"callbacks lack {state[_CLASS]}: the checkpoint holds the averages that it had "
                "put into the model, and training would go on from them. Give it as before."
            )


def _paired(
    callbacks: Sequence[keras.callbacks.Callback], states: Sequence[State]
) -> tuple[list[tuple[keras.callbacks.Callback, int]], list[State]]:
    """Returns (callback, index of its saved state) pairs, and the states that no callback takes."""
    left, pairs = dict(enumerate(states)), []
    for callback in callbacks:
        name = _class(callback)
        found = next((i for i, state in left.items() if state.get(_CLASS, name) == name), None)
        if found is not None:
            del left[found]
            pairs.append((callback, found))
    return pairs, list(left.values())


def stops_again(
    callbacks: Sequence[keras.callbacks.Callback], states: Sequence[State], loss: float | None
) -> bool:
    """Returns whether callbacks that get these saved states would at once stop the run again.

    Then the run is complete. Otherwise it continues, for example after a job's time limit, or with
    a larger patience. loss: the newest mean loss of the run.
    """
    if any(isinstance(c, keras.callbacks.TerminateOnNaN) for c in callbacks):
        if loss is not None and not np.isfinite(loss):
            return True
    return any(
        isinstance(callback, keras.callbacks.EarlyStopping)
        and bool(states[index].get(_STOPPED_EPOCH))
        and states[index][_WAIT] >= callback.patience
        for callback, index in _paired(callbacks, states)[0]
    )


def _restore(
    callback: keras.callbacks.Callback,
    state: State,
    arrays: dict[str, np.ndarray],
    prefix: str,
    warn: Callable[[str], None],
) -> None:
    """Restores the state of one callback, with the arrays whose names begin with `prefix`."""
    if _UNSAVED in state:
        warn(
            f"callback {type(callback).__name__} starts again: its state was not JSON when "
            "the checkpoint was written, so the checkpoint does not hold it."
        )
        return
    best_weights = [v for name, v in arrays.items() if name.startswith(prefix)]
    if best_weights and hasattr(callback, _BEST_WEIGHTS):
        setattr(callback, _BEST_WEIGHTS, [value.copy() for value in best_weights])
    if "get_state" in state:
        if hasattr(callback, "set_state"):
            callback.set_state(json_copy(state["get_state"]))  # copied: mid-epoch restores twice
        return
    if state.get(_ROWS) is not None and isinstance(callback, keras.callbacks.CSVLogger):
        # Writes the rows again, which CSVLogger.on_train_begin has removed, and lets it append.
        with tf.io.gfile.GFile(callback.filename, "w") as file:
            file.write(state[_ROWS])
        append, callback.append = callback.append, True
        callback.on_train_begin()
        callback.append, callback.keys = append, state[_KEYS]
    for name, value in state.items():
        if name in _CALLBACK_FIELDS and hasattr(callback, name):
            setattr(callback, name, value)


def _rows(logger: keras.callbacks.CSVLogger) -> str | None:
    """Returns the text of a CSVLogger's file; None if there is no file, or no text."""
    try:
        with tf.io.gfile.GFile(logger.filename) as file:  # GFile keeps line ends
            return file.read()  # type: ignore[no-any-return]
    except (tf.errors.OpError, UnicodeDecodeError):
        return None


def _kind(value: np.ndarray | keras.Variable) -> str:
    """Returns the dtype and shape of an array or a variable, such as "float32 [3, 3, 1, 32]"."""
    if isinstance(value.dtype, str):
        dtype = value.dtype
    else:
        dtype = np.dtype(value.dtype).name
    return f"{dtype} {[int(size) for size in value.shape]}"
