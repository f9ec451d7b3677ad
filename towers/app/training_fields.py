"""Declares the fields of TrainConfig that say how it is trained, and what is written."""

import dataclasses
import re

from towers.app.fields import (
    Role,
    choice,
    code,
    count,
    fraction,
    number,
    path,
    switch,
    text,
    value_error,
)
from towers.app.machine_fields import AUTO, ON_THE_MACHINE
from towers.machine import choices

WARN = "warn"
FAST_STEPS = 2  # of training and of validation with `fast_dev_run`
SCHEDULES = ("constant", "cosine", "linear")  # and step:E1,E2


def step_epochs(schedule: str) -> list[int]:
    """Returns [30, 60] for "step:30,60", [] for another schedule; ValueError if it is unknown."""
    if schedule in SCHEDULES:
        return []
    kind, _, text = schedule.partition(":")
    parts = text.split(",")
    epochs = [int(part) for part in parts if part.isdecimal() and len(part) < 19]
    if kind != "step" or len(epochs) != len(parts) or [0, *epochs] != sorted({0, *epochs}):
        raise value_error(
            "schedule",
            schedule,
            f"one of {', '.join(SCHEDULES)}, or step:30,60: the epochs, in "
            "ascending order, after which the learning rate is a tenth",
        )
    return epochs


def _check_pattern(name: str, value: str) -> None:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise value_error(name, value, f"a regular expression: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingFields:
    """Holds length, updates, regularization, files, callbacks, reports and exports."""

    # Length, updates and regularization.
    epochs: int = count(
        12, "The number of passes over the training data; 0 only evaluates.", Role.LIMIT, at_least=0
    )
    max_steps: int | None = count(
        None,
        "The number of updates after which the run ends, even within an epoch. Default: no limit.",
        Role.LIMIT,
    )
    fast_dev_run: bool = switch(
        False,
        "Tries every part of a run: two updates, two batches of validation, a checkpoint, "
        "final.keras, and an export, by default into the run's directory.",
        Role.LIMIT,
    )
    optimizer: str | None = text(
        None,
        "The name of a Keras optimizer, such as adam or sgd. Default: the model's own optimizer.",
        Role.OPTIMIZER,
    )
    learning_rate: float | None = number(
        None,
        "The learning rate of the update with the full-batch gradient, for any number of towers. "
        "Default: the optimizer's own rate.",
        Role.OPTIMIZER,
    )
    schedule: str = text(
        "constant",
        "The learning rate over `epochs` or `max_steps`. cosine and linear end at 0; step:30,60 "
        "takes a tenth after each of these epochs.",
        Role.OPTIMIZER,
        check=lambda name, value: step_epochs(value),
    )
    warmup_steps: int = count(
        0,
        "The number of updates over which the learning rate rises from 0, before `schedule`.",
        Role.OPTIMIZER,
        at_least=0,
    )
    weight_decay: float | None = number(
        None,
        "The weight decay of every trainable variable: each "
        "update subtracts learning rate * weight_decay * variable. Default: the optimizer's own, "
        "mostly none.",
        Role.OPTIMIZER,
    )
    momentum: float | None = fraction(
        None, "The momentum of sgd or rmsprop. Default: the optimizer's own.", Role.OPTIMIZER
    )
    clip_norm: float | None = number(
        None,
        "The largest global norm of the full-batch gradients; "
        "larger gradients are scaled down. Default: no limit.",
        Role.OPTIMIZER,
    )
    ema: float | None = fraction(
        None,
        "The momentum, such as 0.999, of a moving average of each "
        "variable over the updates. final.keras holds the averages. Default: none.",
        Role.OPTIMIZER,
    )
    class_weight: str | None = text(
        None,
        "The weight of each class in the loss, as in Keras' fit: 0:1,1:5 (other classes weigh 1), "
        "or balanced, which makes all classes count equally. Default: all weigh 1.",
    )
    batch_norm: str | None = choice(
        None,
        choices.BATCH_NORM,
        "The examples that "
        "BatchNormalization takes mean and variance of. synchronized: the whole batch. average "
        "and tower0: each tower's; the moving averages follow the average over the towers, or "
        "tower 0. Default: synchronized.",
    )
    freeze: str | None = text(
        None,
        "A regular expression, such as ^(conv1|bn)/. It freezes each layer if it is found in the "
        "paths of all its variables. Default: none.",
        Role.BEGINNING,
        check=_check_pattern,
    )
    init_from: str | None = path(
        None,
        "A .keras file with starting values for variables of the same names and shapes. Default: "
        "all start at random values.",
        Role.BEGINNING,
    )
    seed: int = count(
        0,
        "The seed of the parameters, of the order of the examples and of dropout.",
        at_least=0,
        at_most=2**32 - 1,
    )  # NumPy's limit
    precision: str = choice(
        "float32",
        ("float32", "mixed_float16", "mixed_bfloat16"),
        "Keras' dtype policy in all towers. float32 is exact up to rounding.",
    )
    deterministic: bool = switch(
        False,
        "Uses only kernels that give the same bits twice; an operation without one is an error. "
        "It costs speed on GPUs; CPUs give the same bits without it.",
    )
    nonfinite: str = choice(
        "stop",
        ("stop", "skip"),
        "The reaction to a NaN or infinite loss or "
        "gradient: stop ends the run before the update, skip leaves the update out and counts it.",
        Role.FREE,
    )

    # Files and callbacks.
    run_dir: str | None = path(
        None,
        "The directory of the run, new or empty, or a URL of fsspec, such as s3://bucket/path. "
        "Default: the next free runs/<model>-<dataset>-001.",
        Role.ONCE | Role.LOCAL,
    )
    resume: str | None = path(
        None,
        "The directory of a run to continue, with all its flags. "
        "Beside it, you may give {FREE}. You may also give {LIMIT} if the run has not reached it, "
        "and a larger {LARGER}. `resume`=auto continues the run in `run_dir`, or begins it there.",
        Role.ONCE | Role.LOCAL,
    )
    trust_run_dir: bool = switch(
        False,
        "With `resume`, `evaluate` or `predict`, imports the modules that the run's config.json "
        "names, and so executes their code. Modules that you name again need no trust.",
        ON_THE_MACHINE | Role.ONCE,
    )
    checkpoint_every: int | None = count(
        None,
        "The number of updates between two checkpoints; the "
        "end of each epoch is saved, too. Default: at least one checkpoint every 10 minutes.",
        ON_THE_MACHINE,
    )
    keep_checkpoints: int = count(
        3,
        "The number of newest checkpoints that are kept, beside the best one. `replay` and "
        "`audit` need a checkpoint that is kept.",
        ON_THE_MACHINE,
    )
    keep_best: int = count(
        1,
        "The number of best epochs, by `monitor`, whose models are kept. With 2 or more, "
        "best-epoch-N.keras holds each, beside best.keras.",
        ON_THE_MACHINE,
    )
    monitor: str | None = text(
        None,
        "The column of results.csv by which best.keras is chosen; among equal values, the lowest "
        "val_loss is the best. Default: val_accuracy, or val_loss if there is none.",
    )
    monitor_mode: str = choice(
        AUTO,
        (AUTO, "min", "max"),
        "Whether the lowest or the highest "
        "`monitor` is the best. auto uses what Keras knows of the metric.",
    )
    callbacks: str | None = code(
        None,
        "A function package.module:function that returns a list of Keras callbacks. Default: none.",
    )
    early_stopping: int | None = count(
        None,
        "The number of epochs without a better `monitor` "
        "after which the run ends. Default: no limit.",
        Role.LARGER,
    )
    tensorboard: bool = switch(
        False,
        "Writes the scalars of each epoch to tensorboard/ in the run's directory.",
        ON_THE_MACHINE,
    )
    price: float | None = number(
        None,
        "The price of an hour on this machine, in any currency. The time to the end, and the time "
        "of the whole run, are shown with their cost. Default: none.",
        ON_THE_MACHINE,
    )
    confusion_matrix: bool = switch(
        False,
        "Draws confusion.png at the end: which classes of the test examples the final model takes "
        "for which. It predicts all test examples once more.",
        Role.FREE,
    )
    noise_scale: bool = switch(
        False,
        "Adds the gradient noise scale to the results: the batch size from which more examples "
        "hardly reduce the noise. It needs two towers and takes time.",
    )

    ledger: int = count(
        20,
        "The number of updates between two lines of ledger.csv: digests by which towers-compare "
        "finds where two runs part. 0 writes no ledger.",
        Role.FREE,
        at_least=0,
    )

    # Checks before training, reports instead of training, and exports after training.
    verify_gradients: bool | str = switch(
        False,
        "Compares the towers' gradient with the gradient of one tower on the first batch. If they "
        "differ, the run ends before its first update and names the variable; with =warn, it "
        "continues. One device needs memory for the whole global batch.",
        Role.ONCE,
        word=WARN,
    )
    profile: bool = switch(
        False,
        "Times a step and its parts, names the bottleneck and what to "
        "change, and writes a trace for TensorBoard. Trains nothing.",
        Role.ONCE,
    )
    plan: bool = switch(
        False,
        "Prints devices, towers, shard sizes, layers, the memory of each device, and the bytes "
        "and transfers of each step. Trains nothing.",
        Role.ONCE,
    )
    export: str | None = path(
        None,
        "A new directory for a SavedModel of the model at the run's end, or of the model of "
        "`evaluate` or `predict`. With `resume`, a complete run is exported, too. Default: none.",
        ON_THE_MACHINE | Role.ONCE,
    )
