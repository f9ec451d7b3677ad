"""Finds callbacks that would write one file from several workers."""

import json
import os

import keras

from towers.workers.workers import Workers

# Each saves the model: h5py locks the file, and a .keras file is written into by all at once.
# Keras' other writers, TensorBoard and CSVLogger, share a directory or write equal lines.
# If the chief alone restored a backup, the workers would continue from different states.
_WRITERS = {
    "ModelCheckpoint": (
        "filepath",
        "Give it to the chief alone, `callbacks if "
        "towers.join_workers().is_chief else []`, or its path the worker's index.",
    ),
    "BackupAndRestore": ("backup_dir", "Use towers.Resume, which saves and restores all workers."),
}


def check_writers(workers: Workers, callbacks: object) -> None:
    """Raises ValueError, in every worker, if callbacks of two workers would write one file.

    callbacks: None, a callback, a list of callbacks or Keras' CallbackList. Every worker calls this
        function, because the workers exchange the paths.
    """
    if workers.num_workers == 1:
        return
    found = _written(callbacks)
    writers: dict[str, int] = {}  # path -> the first worker that would write it
    for worker, data in enumerate(workers.all_gather(json.dumps(found).encode())):
        for what, path, remedy in json.loads(data):
            first = writers.setdefault(path, worker)
            if first != worker:
                workers.barrier()
                raise ValueError(
                    f"callbacks: {what} would write the same files in workers {first} and "
                    f"{worker}. {remedy}"
                )


def _written(callbacks: object) -> list[list[str]]:
    """Returns [callback, path, remedy] for each file or directory that callbacks write."""
    found = []
    given = getattr(callbacks, "callbacks", callbacks)  # those of a CallbackList
    for callback in keras.tree.flatten(given or []):
        for name, (attribute, remedy) in _WRITERS.items():
            if isinstance(callback, getattr(keras.callbacks, name)):
                path = os.path.abspath(str(getattr(callback, attribute)))
                found.append([f"{name}({attribute}={path!r})", path, remedy])
    return found
