"""Copies of variables and of callbacks' memory for a checkpoint, and their way back."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from towers.checkpointing.checkpoints import json_copy
from towers.checkpointing.train_state import plain
from towers.step import TowerStep

# What Keras' own callbacks remember from epoch to epoch.
_CALLBACK_FIELDS = ("best", "wait", "best_epoch", "stopped_epoch", "cooldown_counter")
_BEST_WEIGHTS = "best_weights"
_UNSAVED = "unsaved"  # in place of what a callback remembers, where that was no JSON


def variables_of(step: TowerStep) -> dict[str, Sequence[keras.Variable]]:
    """All variables of a step: the model's (with its seeds), the optimizer's, the metrics' sums."""
    return {
        "model": step.model.variables,
        "optimizer": step.optimizer.variables,
        "metrics": step.metrics_variables,
    }


def copy_arrays(groups: Mapping[str, Sequence[keras.Variable]]) -> dict[str, np.ndarray]:
    """Copies of the variables of each group on the host."""
    return {
        f"{group}/{i}/{variable.path}": np.asarray(variable.value.numpy())
        for group, variables in groups.items()
        for i, variable in enumerate(variables)
    }


def assign_arrays(
    groups: Mapping[str, Sequence[keras.Variable]], arrays: dict[str, np.ndarray], path: Path
) -> None:
    """Assigns what `copy_arrays` copied.

    Variables are matched by their order: paths count the models that a process has made before.

    Raises:
        ValueError: the first variable that differs, with both shapes; nothing is assigned.
    """
    pairs: list[tuple[Any, np.ndarray]] = []
    for group, variables in groups.items():
        saved = {k: v for k, v in arrays.items() if k.startswith(f"{group}/")}
        for variable, (name, value) in zip(variables, saved.items(), strict=False):
            theirs = f"{name.split('/', 2)[-1]} {_kind(value)}"
            if _kind(value) != _kind(variable):
                raise _differs(path, group, f"{variable.path} is {_kind(variable)}", theirs)
            pairs.append((variable, value))
        if len(saved) != len(variables):
            raise _differs(path, group, f"{len(variables)} variables", f"{len(saved)}")
    for variable, value in pairs:
        variable.assign(value)


def callbacks_arrays(callbacks: Sequence[Any]) -> dict[str, np.ndarray]:
    """Copies of the best weights that `EarlyStopping(restore_best_weights=True)` keeps."""
    return {
        f"callbacks/{i}/{j}": np.array(value)
        for i, callback in enumerate(callbacks)
        for j, value in enumerate(_best_weights(callback))
    }


def _best_weights(callback: Any) -> Sequence[np.ndarray]:
    """A callback's best weights; of another kind than Keras', the name means something else."""
    values = getattr(callback, _BEST_WEIGHTS, None)
    if isinstance(values, list) and all(isinstance(value, np.ndarray) for value in values):
        return values
    return []


def callbacks_state(
    callbacks: Sequence[Any], warn: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Copies of what each callback remembers, as JSON values, which later steps do not change.

    A callback of the user's takes part with `get_state()` -> JSON values, and `set_state(value)`.

    Args:
        callbacks: the user's.
        warn: called with one line for each callback whose state is no JSON: it is left out.
    """
    return [_callback_state(callback, warn) for callback in callbacks]


def _callback_state(callback: Any, warn: Callable[[str], None]) -> dict[str, Any]:
    if hasattr(callback, "get_state"):
        state = {"get_state": callback.get_state()}
    else:
        state = {name: getattr(callback, name) for name in _CALLBACK_FIELDS
                 if hasattr(callback, name)}
    for name, value in state.items():
        try:
            state[name] = json_copy(value if name == "get_state" else plain(value))
        except ValueError as error:
            said = "get_state() returned" if name == "get_state" else f"its `{name}` holds"
            warn(
                f"callback {type(callback).__name__}: {said} what is no JSON ({error}); "
                "checkpoints go without it, and a resumed run would begin it anew. Return numbers, "
                "text, lists and dicts from get_state()."
            )
            return {_UNSAVED: True}
    return state


def restore_callbacks(
    callbacks: Sequence[Any],
    states: Sequence[dict[str, Any]],
    arrays: dict[str, np.ndarray],
    warn: Callable[[str], None],
) -> None:
    """Gives callbacks back what they remembered; those added since begin anew.

    Args:
        callbacks: in the order in which they were saved.
        states: of `callbacks_state`.
        arrays: of the checkpoint; those of `callbacks_arrays` are among them.
        warn: called with one line for each callback whose state could not be saved.
    """
    for i, (callback, state) in enumerate(zip(callbacks, states, strict=False)):
        if _UNSAVED in state:
            warn(
                f"callback {type(callback).__name__} begins anew: its state was no JSON when the "
                "checkpoint was written, which therefore does not hold it."
            )
            continue
        best_weights = [v for name, v in arrays.items() if name.startswith(f"callbacks/{i}/")]
        if best_weights and hasattr(callback, _BEST_WEIGHTS):
            setattr(callback, _BEST_WEIGHTS, [value.copy() for value in best_weights])
        if "get_state" in state:
            if hasattr(callback, "set_state"):
                callback.set_state(json_copy(state["get_state"]))  # it may be put back twice
            continue
        for name, value in state.items():
            if hasattr(callback, name):
                setattr(callback, name, value)


def _kind(value: Any) -> str:
    """"float32 [3, 3, 1, 32]", of an array or a variable."""
    dtype = value.dtype if isinstance(value.dtype, str) else np.dtype(value.dtype).name
    return f"{dtype} {[int(size) for size in value.shape]}"


def _differs(path: Path, group: str, ours: str, theirs: str) -> ValueError:
    return ValueError(f"{path} holds another {group}: here {ours}, in the checkpoint {theirs}.")
