"""Agreement before the first step: all workers have one model, optimizer, towers and versions."""

import hashlib

import keras
import tensorflow as tf

from towers import __version__
from towers.workers.cluster import Cluster
from towers.workers.workers import Workers


def check_agreement(
    cluster: Cluster, model: keras.Model, optimizer: keras.optimizers.Optimizer, **options: object
) -> None:
    """Raises ValueError, in every worker, where one differs from the chief; says in what.

    Args:
        cluster: the workers.
        model, optimizer: what is trained, built; each variable is compared by its bits.
        options: other values that must be equal in all workers, by their names; JSON can hold them.
    """
    if cluster.num_workers > 1:
        Workers(cluster).check_same({
            "towers' version": __version__,
            "TensorFlow's version": tf.__version__,
            "Keras' version": keras.__version__,
            **options,
            "the optimizer": type(optimizer).__name__,
            **{
                f"variable {i} {variable.path.rpartition('/')[2]}": digest(variable)
                for i, variable in enumerate([*model.variables, *optimizer.variables])
            },
        })


def digest(variable: keras.Variable) -> str:
    """A digest of a variable's bits and shape: 16 hexadecimal digits of their SHA-256."""
    value = variable.value.numpy()
    return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()[:16]
