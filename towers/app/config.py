"""Defines TrainConfig, the frozen and validated configuration of a run."""

import dataclasses
import json
import re
from typing import Any, ClassVar

from towers.app import fields
from towers.app.class_weight import as_text
from towers.app.fields import (
    Role, choice, code, count, fraction, number, path, switch, text, value_error,
)
from towers.machine import choices
from towers.machine.argument_names import unknown_argument

# Larger numbers would lead to computations that never end or cannot start.
_MOST_DEVICES, _MOST_TOWERS = 1024, 65_536
_LONGEST_WAIT = 1_000_000  # seconds; the system's limit is not much higher
AUTO, WARN = "auto", "warn"
SCHEDULES = ("constant", "cosine", "linear")  # and step:E1,E2
_ON_THE_MACHINE = Role.FREE | Role.LOCAL


def step_epochs(schedule: str) -> list[int]:
    """Returns [30, 60] for "step:30,60", [] for another schedule; ValueError if it is unknown."""
    if schedule in SCHEDULES:
        return []
    kind, _, text = schedule.partition(":")
    parts = text.split(",")
    epochs = [int(part) for part in parts if part.isdecimal() and len(part) < 19]
    if kind != "step" or len(epochs) != len(parts) or [0, *epochs] != sorted({0, *epochs}):
        raise value_error(
            "schedule", schedule, f"one of {', '.join(SCHEDULES)}, or step:30,60: the epochs, in "
            "ascending order, after which the learning rate is a tenth"
        )
    return epochs


def _stages_as_text(value: Any) -> Any:
    """Returns "a,b" for the layer names ["a", "b"]; other values stay."""
    are_names = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    if are_names and any("," in each for each in value):
        raise value_error("stages", value, "a list of layer names without commas")
    return ",".join(value) if are_names else value


def _size_as_text(value: Any) -> Any:
    """Returns "224x224" for (224, 224); other values stay."""
    are_sizes = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    return "x".join(map(str, value)) if are_sizes else value


def _schedule_as_text(value: Any) -> Any:
    """Returns "step:30,60" for {"step": [30, 60]}; other values stay."""
    if isinstance(value, dict) and list(value) == ["step"]:
        epochs = value["step"]
        are_epochs = isinstance(epochs, list | tuple) and all(type(each) is int for each in epochs)
        return f"step:{','.join(map(str, epochs))}" if are_epochs else value
    return value


# Flags are texts; in Python, the same fields also take lists and dicts.
_AS_TEXT = {
    "class_weight": as_text, "image_size": _size_as_text, "schedule": _schedule_as_text,
    "stages": _stages_as_text,
}


def _check_image_size(name: str, value: str) -> None:
    if not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(x[13])?", value):
        raise value_error(
            name, value, "HEIGHTxWIDTH, each from 1 to 99999, or HEIGHTxWIDTHxCHANNELS, 1 (gray) "
            "or 3 (color), such as 224x224x3"
        )


def _check_pattern(name: str, value: str) -> None:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise value_error(name, value, f"a regular expression: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Describes a training run. Each field is a flag of train.py with the same help text."""

    # Model and data.
    model: str = code("cnn", "The model: a built-in one (cnn, notebook_cnn, mlp, gru, gru_large, "
        "lstm, lstm_large, resnet, resnet20, resnet56, resnet50), FILE.keras, which is trained "
        "further, or package.module:function, called with (input_shape, num_classes) or without "
        "arguments. A compiled model brings its own loss, metrics and optimizer.", is_path=True)
    dataset: str = code("mnist", "The data: a built-in data set (mnist, fashion_mnist, cifar10, "
        "music, image_folder, npz, synthetic, array_record, tfrecord), or "
        "package.module:function, which returns (train, test).")
    data_dir: str | None = path(None, "The directory of the data set's files; for npz, the file. "
        "Beside `resume`, it is the place to which the same data have moved. Default: the data "
        "set's own place.", _ON_THE_MACHINE)
    image_size: str | None = text(None, "The size of all images of image_folder: HEIGHTxWIDTH or "
        "HEIGHTxWIDTHxCHANNELS, such as 224x224x3. Default: the most frequent size.",
        check=_check_image_size)
    features: str | None = code(None, "A function package.module:function that turns one record of "
        "array_record or tfrecord into (x, y). These data sets need it. Default: none.")
    data_workers: int = count(0, "The number of processes that read a source with __len__ and "
        "__getitem__. Results do not depend on it. Default: 0, a thread of this process, which "
        "needs no copies.", _ON_THE_MACHINE, at_least=0, at_most=1024)
    shuffle_buffer: int = count(10_000, "The number of examples in memory among which a "
        "tf.data.Dataset is shuffled if it does not fit into memory. A larger number mixes better.")
    augment: str | None = code(None, "Random changes of each training example: crop_flip, or "
        "package.module:function, which takes (x, seed) and returns x, or takes nothing and "
        "returns a Keras layer. Default: none.")

    # Devices, towers and batch.
    num_gpus: int | None = count(None, "The number of devices that run towers. With a fixed "
        "`num_towers`, results do not depend on it. Default: all GPUs; without GPUs, one logical "
        "CPU device for each core.", _ON_THE_MACHINE | Role.BEGINNING, at_most=_MOST_DEVICES)
    logical_gpus: int | None = count(None, "The number of logical GPUs, of equal memory, into "
        "which the GPUs are divided. It simulates a larger machine with real kernels and copies, "
        "not its speed. Default: GPUs are not divided.", _ON_THE_MACHINE | Role.BEGINNING,
        at_most=_MOST_DEVICES)
    num_towers: int | None = count(None, "The number of towers over all devices. It defines the "
        "run: a fixed number gives bit-identical results on any number of devices. Default: one "
        "for each device.", Role.BEGINNING, at_most=_MOST_TOWERS)
    accumulate: int | None = count(None, "The number of towers on each device, computed one after "
        "the other, instead of `num_towers`. A device then needs memory for one tower's share of "
        "the batch. Default: 1.", Role.BEGINNING, at_most=1024)
    device: str = choice(AUTO, (AUTO, "gpu", "cpu"), "The kind of device that runs towers. auto "
        "takes GPUs if there are any.", _ON_THE_MACHINE | Role.BEGINNING)
    variable_device: str = choice("cpu", ("cpu", "gpu"), "The device that holds and updates the "
        "parameters, /cpu:0 or /gpu:0. The CPU is equally near to all GPUs.")
    strategy: str = choice("parameter_server", choices.STRATEGIES, "The place of the "
        "parameters. parameter_server holds them on `variable_device` alone. mirrored holds a "
        "copy of them and of the optimizer's state on each GPU. sharded holds a copy of them, and "
        "divides the update and the optimizer's state among the GPUs. Both give the results of "
        "`variable_device`=gpu.", Role.FREE, refused={choices.ASYNC: choices.ASYNC_REFUSED})
    gpus_per_tower: int = count(1, "The number of GPUs that share the layers of each tower, in as "
        "many stages, for a model that does not fit into one GPU. With `accumulate`=8, 8 towers "
        "use them in a pipeline. Default: 1, a GPU holds all layers.", Role.FREE | Role.BEGINNING,
        at_most=_MOST_DEVICES)
    stages: str | None = text(None, "With `gpus_per_tower`, the names of the layers that begin the "
        "second and later stages: NAME,NAME. `plan` shows the stages. Default: balanced by the "
        "bytes of parameters and outputs.", Role.FREE | Role.BEGINNING)
    batch_size: int | None = count(None, "Global batch: the number of examples of one update, over "
        "all towers. Default: 128.")
    batch_size_per_gpu: int | None = count(None, "The number of examples of one update on each "
        "device, instead of `batch_size`. Default: `batch_size` divided among the towers.")
    jit_compile: bool | str = switch(AUTO, "Compiles each tower with XLA, which takes longer to "
        "start and is mostly faster on GPUs. auto follows Keras on GPUs: XLA compiles if every "
        "layer supports it, or as a compiled model says. On CPUs, auto compiles small recurrent "
        "models.", word=AUTO)
    cpu_threads: int | None = count(None, "The number of threads of each operation on a CPU. They "
        "change the last bits of the results. Default: the cores divided among the towers.",
        Role.BEGINNING, at_most=65_536)
    worker_timeout: float = number(60.0, "The seconds without an answer after which a worker "
        "counts as lost and all workers stop. Default: a minute.", Role.FREE, at_most=_LONGEST_WAIT)
    hang_timeout: float | str = number(AUTO, "The seconds without a step, a read batch or a "
        "written file after which a run says where it hangs and ends with exit code 4; 0 means "
        "never. auto means 10 times the longest wait so far, at least 5 minutes.",
        _ON_THE_MACHINE, at_most=_LONGEST_WAIT, word=AUTO)

    # Length, updates and regularization.
    epochs: int = count(12, "The number of passes over the training data; 0 only evaluates.",
        Role.LIMIT, at_least=0)
    max_steps: int | None = count(None, "The number of updates after which the run ends, even "
        "within an epoch. Default: no limit.", Role.LIMIT)
    optimizer: str | None = text(None, "The name of a Keras optimizer, such as adam or sgd. "
        "Default: the model's own optimizer.", Role.OPTIMIZER)
    learning_rate: float | None = number(None, "The learning rate of the update with the "
        "full-batch gradient. It does not depend on the number of towers. Default: the "
        "optimizer's own rate.",
        Role.OPTIMIZER)
    schedule: str = text("constant", "The learning rate over `epochs` or `max_steps`. cosine and "
        "linear end at 0, and step:30,60 takes a tenth after each of these epochs. The default, "
        "constant, can be changed by callbacks.", Role.OPTIMIZER,
        check=lambda name, value: step_epochs(value))
    warmup_steps: int = count(0, "The number of updates over which the learning rate rises from 0, "
        "before `schedule`. Default: 0.", Role.OPTIMIZER, at_least=0)
    weight_decay: float | None = number(None, "The weight decay of every trainable variable: each "
        "update subtracts learning rate * weight_decay * variable. Default: the optimizer's own, "
        "mostly none.", Role.OPTIMIZER)
    momentum: float | None = fraction(None, "The momentum of sgd or rmsprop. Default: the "
        "optimizer's own.", Role.OPTIMIZER)
    clip_norm: float | None = number(None, "The largest global norm of the full-batch gradients; "
        "larger gradients are scaled down. Default: no limit.", Role.OPTIMIZER)
    ema: float | None = fraction(None, "The momentum, such as 0.999, of a moving average of each "
        "variable over the updates. final.keras holds the averages. Default: none.", Role.OPTIMIZER)
    class_weight: str | None = text(None, "The weight of the examples of each class in the loss, "
        "as in Keras' fit: 0:1,1:5 (other classes weigh 1), or balanced, which makes all classes "
        "count equally. Default: all weigh 1.")
    batch_norm: str | None = choice(None, choices.BATCH_NORM, "The examples that "
        "BatchNormalization takes mean and variance of. synchronized, the default: the whole "
        "batch. average and tower0: each tower's; the moving averages follow the average over the "
        "towers, or tower 0.")
    freeze: str | None = text(None, "A regular expression, such as ^(conv1|bn)/. A layer is "
        "frozen, as in Keras, if the expression is found in the paths of all its variables. "
        "Default: none.", Role.BEGINNING, check=_check_pattern)
    init_from: str | None = path(None, "A .keras file with starting values for the variables of "
        "the same names and shapes. Default: all start at random values.", Role.BEGINNING)
    seed: int = count(0, "The seed of the parameters, of the order of the examples and of dropout.",
        at_least=0, at_most=2**32 - 1)  # NumPy's limit
    precision: str = choice("float32", ("float32", "mixed_float16", "mixed_bfloat16"), "Keras' "
        "dtype policy in all towers. float32 is exact up to rounding.")
    deterministic: bool = switch(False, "Uses only kernels that give the same bits twice; an "
        "operation without such a kernel is an error. Off by default, because it costs speed on "
        "GPUs, and CPUs give the same bits without it.")
    nonfinite: str = choice("stop", ("stop", "skip"), "The reaction to a NaN or infinite loss or "
        "gradient: stop ends the run before the update, skip leaves the update out and counts it.",
        Role.FREE)

    # Files and callbacks.
    run_dir: str | None = path(None, "The directory of the run, new or empty. It may be a URL of "
        "fsspec, such as s3://bucket/path, which is written by way of a local copy. Default: the "
        "next free runs/<model>-<dataset>-001.", Role.ONCE | Role.LOCAL)
    resume: str | None = path(None, "The directory of a run to continue, with all its flags. "
        "Beside it, you may give {FREE}. You may also give {LIMIT} if the run has not reached it, "
        "and a larger {LARGER}. `resume`=auto continues the run in `run_dir`, or begins it there.",
        Role.ONCE | Role.LOCAL)
    trust_run_dir: bool = switch(False, "With `resume`, `evaluate` or `predict`, imports the "
        "modules that the run's config.json names. Off by default, because their code is executed. "
        "Modules that you name again, beside it, need no trust.", _ON_THE_MACHINE | Role.ONCE)
    checkpoint_every: int | None = count(None, "The number of updates between two checkpoints; the "
        "end of each epoch is saved, too. Default: at least one checkpoint every 10 minutes.",
        _ON_THE_MACHINE)
    monitor: str | None = text(None, "The column of results.csv that decides which epoch is the "
        "best; best.keras holds its model. Among equal values, the lowest val_loss is the best. "
        "Default: val_accuracy, or val_loss if there is none.")
    monitor_mode: str = choice(AUTO, (AUTO, "min", "max"), "Whether the lowest or the highest "
        "`monitor` is the best. auto uses what Keras knows of the metric.")
    callbacks: str | None = code(None, "A function package.module:function that returns a list of "
        "Keras callbacks. Default: none.")
    early_stopping: int | None = count(None, "The number of epochs without a better `monitor` "
        "after which the run ends. Default: no limit.", Role.LARGER)
    tensorboard: bool = switch(False, "Writes the scalars of each epoch to tensorboard/ in the "
        "run's directory. Off by default, because results.csv and results.png hold them.",
        _ON_THE_MACHINE)

    noise_scale: bool = switch(False, "Adds the gradient noise scale to the results: the batch "
        "size at which half of the examples are wasted. It needs two towers. Off by default, "
        "because it takes time.")

    # Checks before training, reports instead of training, and exports after training.
    verify_gradients: bool | str = switch(False, "Compares the towers' gradient with the "
        "gradient of one tower on the first batch. If they differ, the run ends before its first "
        "update and names the variable; with =warn, it continues. Off by default, because one "
        "device needs memory for the whole global batch.", Role.ONCE, word=WARN)
    profile: bool = switch(False, "Times a step and its parts, names the bottleneck and what to "
        "change, and writes a trace for TensorBoard. Trains nothing.", Role.ONCE)
    plan: bool = switch(False, "Prints devices, towers, shard sizes, and the bytes and transfers "
        "of each step. Trains nothing.", Role.ONCE)
    export: str | None = path(None, "A new directory for a SavedModel. It gets the model at the "
        "run's end, or the model of `evaluate` or `predict`. With `resume`, a complete run is "
        "exported, too. Default: none.",
        _ON_THE_MACHINE | Role.ONCE)

    named: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **given: Any) -> "TrainConfig":
        """Records the names of the given fields: a default that is given counts as a choice."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise unknown_argument(cls.__name__, name, known)
        config = super().__new__(cls)
        object.__setattr__(config, "named", frozenset(given))
        return config

    def __post_init__(self) -> None:
        """Raises ValueError for values that make no sense or contradict each other."""
        for name, as_flag in _AS_TEXT.items():
            object.__setattr__(self, name, as_flag(getattr(self, name)))
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                value = fields.declared(field).check(field.name, value)
                object.__setattr__(self, field.name, value)
        if self.batch_size is not None and self.batch_size_per_gpu is not None:
            raise ValueError(
                f"batch_size ({self.batch_size}) is the global batch and batch_size_per_gpu "
                f"({self.batch_size_per_gpu}) one device's: give only one of them."
            )
        if self.logical_gpus is not None and self.device == "cpu":
            raise ValueError(
                f"logical_gpus ({self.logical_gpus}) divides GPUs, and device=cpu uses none: give "
                "only one of them."
            )

    def global_batch_size(self, num_devices: int) -> int:
        """Returns the number of examples in one update if `num_devices` devices run towers."""
        if self.batch_size_per_gpu is not None:
            return self.batch_size_per_gpu * num_devices
        return self.batch_size or 128

    def num_towers_on(self, num_devices: int) -> int:
        """Returns the number of towers if `num_devices` devices run them."""
        return self.num_towers or num_devices // self.gpus_per_tower * (self.accumulate or 1)

    def num_steps(self, steps_an_epoch: int) -> int:
        """Returns the number of updates in the run."""
        steps = self.epochs * steps_an_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def given(self) -> dict[str, Any]:
        """Returns the fields that the user has set, by name; an explicit default counts as set.

        `dataclasses.replace` and `from_json` set all fields, so after them only values other than
        the defaults count. A field with the value None counts as not set if None is its default.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = self.named if self.named < defaults.keys() else ()
        return {
            name: getattr(self, name) for name, default in defaults.items()
            if getattr(self, name) != default or name in chosen and default is not None
        }

    @property
    def stage_names(self) -> list[str] | None:
        """Returns the layer names in `stages` as a list, or None without `stages`."""
        return None if self.stages is None else [name.strip() for name in self.stages.split(",")]

    @property
    def image_shape(self) -> tuple[int, int, int | None] | None:
        """Returns (height, width, channels or None), or None without `image_size`."""
        if self.image_size is None:
            return None
        height, width, *channels = map(int, self.image_size.split("x"))
        return height, width, channels[0] if channels else None

    @property
    def has_schedule(self) -> bool:
        """Returns whether a schedule or a warm-up changes the learning rate."""
        return self.schedule != "constant" or self.warmup_steps > 0

    def to_json(self) -> str:
        """Returns the configuration as JSON with one field on each line."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Reads the configuration that `to_json` wrote."""
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            values = {k: v for k, v in json.loads(text).items() if k in known or v is not None}
        except (ValueError, AttributeError, RecursionError) as error:
            text = f"{error}. Put back a copy, or begin a new run."
            raise ValueError(f"config.json must be a JSON object: {text}") from None
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"config.json holds {fields.short_repr(unknown)}, which this version of towers "
                "does not know. Use the version that wrote it, or remove the entry."
            )
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None


def fields_with(roles: Role) -> tuple[str, ...]:
    """Returns the names of TrainConfig's fields that have any of these roles."""
    return fields.names(TrainConfig, roles)


TrainConfig.__doc__ = "\n".join([
    f"{TrainConfig.__doc__}\n\n    Args:",
    *(f"        {f.name}: {fields.help_of(TrainConfig, f)}"
      for f in dataclasses.fields(TrainConfig)),
])
