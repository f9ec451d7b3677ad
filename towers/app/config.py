"""TrainConfig: everything that defines a run; frozen, validated, no flags."""

import dataclasses
import json
import re
import warnings
from typing import Any, ClassVar

from towers.app import fields
from towers.app.class_weight import as_text
from towers.app.fields import Role, choice, count, number, part, refused, switch, text
from towers.machine import choices

DEFAULT_BATCH_SIZE = 128
LARGEST_SEED = 2**32 - 1  # NumPy's limit, which keras.utils.set_random_seed passes on
# Beyond these a computation would not end, or not begin.
_MOST_DEVICES, _MOST_TOWERS = 1024, 65_536
_LONGEST_WAIT = 1_000_000  # seconds: the system's own limit is not much above
AUTO = "auto"
WARN = "warn"
SCHEDULES = ("constant", "cosine", "linear")  # and step:E1,E2
_ON_THE_MACHINE = Role.FREE | Role.LOCAL
# Fields of older config.json files, with their defaults: the device policy decides these now.
_RETIRED = {"inline_towers": False, "pack_transfers": AUTO, "prefetch_to_devices": None}


def step_epochs(schedule: str) -> list[int]:
    """[30, 60] of "step:30,60"; [] of a schedule without steps.

    Raises:
        ValueError: there is no such schedule.
    """
    if schedule in SCHEDULES:
        return []
    kind, _, text = schedule.partition(":")
    parts = text.split(",")
    epochs = [int(part) for part in parts if part.isdecimal() and len(part) < 19]
    if kind != "step" or len(epochs) != len(parts) or [0, *epochs] != sorted({0, *epochs}):
        raise refused(
            "schedule", schedule, f"one of {', '.join(SCHEDULES)}, or step:30,60: the epochs, in "
            "ascending order, after which the learning rate is a tenth"
        )
    return epochs


def _check_image_size(name: str, value: str) -> None:
    if not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(x[13])?", value):
        raise refused(
            name, value, "HEIGHTxWIDTH, each from 1 to 99999, or HEIGHTxWIDTHxCHANNELS, 1 (gray) "
            "or 3 (color), such as 224x224x3"
        )


def _check_pattern(name: str, value: str) -> None:
    try:
        re.compile(value)
    except (re.error, OverflowError, RecursionError) as error:
        raise refused(name, value, f"a regular expression: {error}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. Each field is a flag of train.py, and its text that flag's help."""

    # Model and data.
    model: str = text(
        "cnn", "cnn, notebook_cnn, mlp, gru, gru_large, lstm, lstm_large, resnet, resnet20, "
        "resnet56, resnet50; package.module:function (input_shape, num_classes), or without "
        "arguments, -> a Keras model; or FILE.keras, which is trained further. A compiled one "
        "brings its own loss, metrics and optimizer. The default trains in minutes.", is_path=True)
    dataset: str = text(
        "mnist", "mnist, fashion_mnist, cifar10, music, image_folder, npz, synthetic, "
        "array_record, tfrecord; tfds:NAME, of TensorFlow Datasets; or package.module:function -> "
        "(train, test). The default needs no download.")
    data_dir: str | None = text(
        None, "Directory of the data set's files; for npz, the file. Beside `resume`, the place to "
        "which the same data have moved. Default: the data set's own place.", _ON_THE_MACHINE,
        is_path=True)
    image_size: str | None = text(
        None, "For image_folder: the size of all images, HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, "
        "such as 224x224x3. Default: the most frequent size.", check=_check_image_size)
    features: str | None = text(
        None, "For array_record and tfrecord, which need one: package.module:function, one record "
        "-> (x, y). Default: none.")
    data_workers: int = count(
        0, "Processes that read a source with __len__ and __getitem__; they change no bit. "
        "Default: 0, a thread of this process, which needs no copies.", _ON_THE_MACHINE,
        at_least=0, at_most=1024)
    data_timeout: float = number(
        300.0, "Seconds that one example of such a source may take. The default outlasts a slow "
        "network disk.", _ON_THE_MACHINE, at_most=_LONGEST_WAIT)
    shuffle_buffer: int = count(
        10_000, "Examples in memory among which a tf.data.Dataset is shuffled that does not fit "
        "there. More than the default mix better.")
    augment: str | None = text(
        None, "Changes each training example at random: crop_flip; Keras layers by name, such as "
        "RandomFlip,RandomRotation(0.1),MixUp; or package.module:function (x, seed) -> x, or -> a "
        "Keras layer. Default: nothing.")

    # Devices, towers and batch.
    num_gpus: int | None = count(
        None, "Devices that run towers. With a fixed `num_towers` it changes no bit of the "
        "results. Default: all GPUs; without any, one logical CPU device a core.",
        _ON_THE_MACHINE | Role.BEGINNING, at_most=_MOST_DEVICES)
    logical_gpus: int | None = count(
        None, "Divides the GPUs into so many, of equal memory, to rehearse a run with fewer: real "
        "kernels and copies, not their speed. Default: each is one.",
        _ON_THE_MACHINE | Role.BEGINNING, at_most=_MOST_DEVICES)
    num_towers: int | None = count(
        None, "Towers, over all devices. They define the run: give their number to get the same "
        "bits on any number of devices. Default: one for each device.", Role.BEGINNING,
        at_most=_MOST_TOWERS)
    accumulate: int | None = count(
        None, "Towers on each device, computed one after the other, in place of `num_towers`: the "
        "gradient of a batch that needs so many times the memory. Default: one.",
        Role.BEGINNING, at_most=1024)
    device: str = choice(
        AUTO, (AUTO, "gpu", "cpu"), "What towers run on. The default takes GPUs when there are "
        "any.", _ON_THE_MACHINE | Role.BEGINNING)
    variable_device: str = choice(
        "cpu", ("cpu", "gpu"), "Where the parameters live and are updated, /cpu:0 or /gpu:0. "
        "Default: the CPU, which is as near to each GPU as to any other.")
    strategy: str = choice(
        "parameter_server", (*choices.STRATEGIES, choices.ASYNC), "parameter_server: the "
        "parameters are on `variable_device` alone; mirrored: each GPU has a copy of them and of "
        "the optimizer's, and all make the same update, with the bits of `variable_device`=gpu; "
        "async is refused. Default: the CPU is as near to each GPU as to any other.", Role.FREE)
    gpus_per_tower: int = count(
        1, "GPUs that share the layers of each tower, in as many stages: for a model that is too "
        "large for one. With `accumulate`=8 they work on 8 towers in a pipeline. Default: one GPU "
        "holds all layers.", Role.FREE | Role.BEGINNING, at_most=_MOST_DEVICES)
    stages: str | None = text(
        None, "With `gpus_per_tower`, the layers that begin the second stage and those after it, "
        "NAME,NAME; `plan` shows them. Default: balanced by the bytes of parameters and outputs.",
        Role.FREE | Role.BEGINNING)
    batch_size: int | None = count(
        None, "Global batch: examples of one update, over all towers; more GPUs do not make it "
        "larger. Default: 128, the Keras convnet's.")
    batch_size_per_gpu: int | None = count(
        None, "Examples of one update on each device, instead of `batch_size`. Default: "
        "`batch_size` divided among the towers.")
    jit_compile: bool | str = switch(
        AUTO, "Compiles each tower with XLA: it takes long to start, and mostly pays on GPUs. "
        "auto: as Keras decides, on GPUs where every layer supports it, or as a compiled model "
        "says; on CPUs small recurrent models.", word=AUTO)
    cpu_threads: int | None = count(
        None, "Threads of each operation on a CPU; they change the last bits of the results. "
        "Default: the cores divided among the towers.", Role.BEGINNING, at_most=65_536)
    worker_timeout: float = number(
        60.0, "Seconds without an answer after which a worker counts as lost and all workers "
        "stop. Default: a minute.", Role.FREE, at_most=_LONGEST_WAIT)
    hang_timeout: float | str = number(
        AUTO, "Seconds without a step, a read batch or a written file after which a single worker "
        "says where it hangs and ends with exit code 4; 0: never. auto: 10 times the longest, at "
        "least 5 minutes and `data_timeout`.", _ON_THE_MACHINE, at_most=_LONGEST_WAIT, word=AUTO)

    # Length, updates and regularization.
    epochs: int = count(
        12, "Passes over the training data; 0 evaluates only. Default: 12, after which the Keras "
        "convnet reaches 0.99 on MNIST.", Role.LIMIT, at_least=0)
    max_steps: int | None = count(
        None, "Updates after which the run ends, in mid-epoch too. Default: no limit.", Role.LIMIT)
    optimizer: str | None = text(
        None, "A Keras optimizer: adam, sgd, ... Default: the model's own.", Role.OPTIMIZER)
    learning_rate: float | None = number(
        None, "The rate of the one update with the averaged gradient; independent of the number of "
        "towers. Default: the optimizer's own.", Role.OPTIMIZER)
    schedule: str = text(
        "constant", "The learning rate over `epochs` (or `max_steps`): constant; cosine or linear, "
        "to 0; or step:30,60, a tenth after each of these epochs. The default can be changed by "
        "callbacks.", Role.OPTIMIZER, check=lambda name, value: step_epochs(value))
    warmup_steps: int = count(
        0, "Updates over which the learning rate rises from 0, before `schedule`. Default: none.",
        Role.OPTIMIZER, at_least=0)
    weight_decay: float | None = number(
        None, "Of every trainable variable in each update: w -= learning rate * weight_decay * w. "
        "Default: the optimizer's own, mostly none.", Role.OPTIMIZER)
    momentum: float | None = part(
        None, "Momentum of sgd or rmsprop. Default: the optimizer's own.", Role.OPTIMIZER)
    clip_norm: float | None = number(
        None, "The largest norm of all averaged gradients together; larger ones are scaled down. "
        "Default: no limit.", Role.OPTIMIZER)
    ema: float | None = part(
        None, "Momentum, such as 0.999, of an average of each variable over the updates, which "
        "final.keras holds in the variable's place. Default: none.", Role.OPTIMIZER)
    label_smoothing: float | None = part(
        None, "The part of each label that is spread over all classes, such as 0.1. Default: none.")
    class_weight: str | None = text(
        None, "The weight of each class' examples in the loss, as in Keras' fit: 0:1,1:5, a class "
        "that is not named 1; or balanced, so that each class counts as much as any other. "
        "Default: all count 1.", convert=as_text)
    dropout: float | None = part(
        None, "Rate of every Dropout layer. Default: the model's own rates.")
    batch_norm: str | None = choice(
        None, choices.BATCH_NORM, "How the towers' BatchNormalization statistics become one. "
        "Default: average, with a warning where such a layer is trained.")
    freeze: str | None = text(
        None, "A regular expression, such as ^(conv1|bn)/: layers stay as they are, frozen as in "
        "Keras, where it is found in the paths of all their variables. Default: none.",
        Role.BEGINNING, check=_check_pattern)
    init_from: str | None = text(
        None, "A .keras file, whose values the variables of the same names and shapes begin with. "
        "Default: all begin at random.", Role.BEGINNING, is_path=True)
    seed: int = count(
        0, "Seed of the parameters, the order of the examples and dropout. The default is fixed, "
        "so that a run can be repeated.", at_least=0, at_most=LARGEST_SEED)
    precision: str = choice(
        "float32", ("float32", "mixed_float16", "mixed_bfloat16"), "Keras' dtype policy in all "
        "towers. The default is exact to float rounding.")
    deterministic: bool = switch(
        False, "Uses only kernels that give the same bits twice, and refuses operations without "
        "any. Off by default: it costs speed on GPUs, and CPUs give the same bits without it.")
    nonfinite: str = choice(
        "stop", ("stop", "skip"), "What a NaN or infinite loss or gradient does: end the run "
        "before the update, or leave that update out and count it.", Role.FREE)

    # Files and callbacks.
    run_dir: str | None = text(
        None, "Directory of the run: new, or empty. s3://bucket/path or another URL of fsspec "
        "works by way of a local copy. Default: the next free runs/<model>-<dataset>-001.",
        Role.ONCE | Role.LOCAL, is_path=True)
    resume: str | None = text(
        None, "Directory of a run that goes on: alone, it brings back every flag. Beside it only "
        "{FREE}; {LIMIT}, where that is not reached yet; or a larger {LARGER}. `resume`=auto: go "
        "on with the run in `run_dir` where there is one, else begin it.", Role.ONCE | Role.LOCAL,
        is_path=True)
    trust_run_dir: bool = switch(
        False, "With `resume`, `evaluate` or `predict`, imports modules that the run's config.json "
        "names from the run's own directory, too. Off by default: code found there is executed.",
        _ON_THE_MACHINE | Role.ONCE)
    checkpoint_every: int | None = count(
        None, "Updates from one checkpoint to the next, beside each epoch's end. Default: at least "
        "one every 10 minutes.", _ON_THE_MACHINE)
    monitor: str | None = text(
        None, "The column of results.csv that makes an epoch the best, whose model best.keras "
        "holds. Default: val_accuracy, or val_loss where there is none.")
    monitor_mode: str = choice(
        AUTO, (AUTO, "min", "max"), "Whether the lowest or the highest `monitor` is the best. The "
        "default is what Keras knows of the metric.")
    callbacks: str | None = text(
        None, "package.module:function -> a list of Keras callbacks, which are told of every step "
        "and epoch. Default: none.")
    early_stopping: int | None = count(
        None, "Epochs without a better `monitor` after which the run ends. Default: never.",
        Role.LARGER)
    tensorboard: bool = switch(
        False, "Writes each epoch's scalars to tensorboard/ in the run's directory. Off by "
        "default: results.csv and results.png hold the scalars.", _ON_THE_MACHINE)
    histograms: bool = switch(
        False, "With `tensorboard`, the parameters' histograms each epoch. Off by default: they "
        "take time and room.", _ON_THE_MACHINE)

    # What comes before training, in place of it, or after it.
    verify_gradients: bool | str = switch(
        False, "Compares the averaged gradient with the large-batch gradient on the first batch. "
        "Where they differ, the run ends before its first update and names the loss or layer; with "
        "=warn it goes on. Off by default: it needs memory for a whole global batch on one device.",
        Role.ONCE, word=WARN)
    profile: bool = switch(
        False, "Times a step and its parts, names what bounds it and what to change, and leaves a "
        "trace for TensorBoard; trains nothing.", Role.ONCE)
    plan: bool = switch(
        False, "Prints devices, towers, shard sizes, the bytes and sends of each step; trains "
        "nothing.", Role.ONCE)
    export: str | None = text(
        None, "A new NAME.onnx, NAME.tflite (LiteRT), or directory of a SavedModel, which holds "
        "the model of the run's end, also of a complete run with `resume`, or of the file of "
        "`evaluate` or `predict`. Default: none.", _ON_THE_MACHINE | Role.ONCE, is_path=True)
    export_pixels: bool = switch(
        False, "With `export`, the exported model takes uint8 images, 0 to 255, and divides them "
        "by 255 itself, as the run did. Off by default: it takes what the trained model takes.",
        _ON_THE_MACHINE | Role.ONCE)

    named: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **given: Any) -> "TrainConfig":
        """Notes which fields are given: a default that somebody names is a choice."""
        config = super().__new__(cls)
        object.__setattr__(config, "named", frozenset(given))
        return config

    def __post_init__(self) -> None:
        """Raises ValueError for a value that makes no sense, or for two that contradict."""
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
        if self.strategy == choices.ASYNC:
            raise ValueError(choices.ASYNC_REFUSED)
        if self.histograms and not self.tensorboard:
            raise ValueError("`histograms` needs `tensorboard`, which shows them.")

    def global_batch_size(self, num_devices: int) -> int:
        """The examples of one update, given how many devices run towers."""
        if self.batch_size_per_gpu is not None:
            return self.batch_size_per_gpu * num_devices
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def num_towers_on(self, num_devices: int) -> int:
        """The towers, given how many devices run them."""
        return self.num_towers or num_devices // self.gpus_per_tower * (self.accumulate or 1)

    def given(self) -> dict[str, Any]:
        """The fields that somebody has set: to another value than the default, or to it by name.

        `dataclasses.replace` and `from_json` name all fields: there only the former are known. None
        is how a script leaves a field to its default.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = self.named if self.named < defaults.keys() else ()
        return {
            name: getattr(self, name) for name, default in defaults.items()
            if getattr(self, name) != default or name in chosen and default is not None
        }

    @property
    def stage_names(self) -> list[str] | None:
        """`stages`, apart."""
        return None if self.stages is None else [name.strip() for name in self.stages.split(",")]

    @property
    def image_shape(self) -> tuple[int, int, int | None] | None:
        """(height, width, channels) of `image_size`; None for what it does not say."""
        if self.image_size is None:
            return None
        height, width, *channels = map(int, self.image_size.split("x"))
        return height, width, channels[0] if channels else None

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate changes by itself."""
        return self.schedule != "constant" or self.warmup_steps > 0

    def to_json(self) -> str:
        """The configuration as JSON, one field a line."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """The configuration that `to_json` wrote, in this version or an older one.

        Raises:
            ValueError: this is no such JSON, a field is unknown, or a value makes no sense.
        """
        try:
            values = dict(json.loads(text).items())
        except (ValueError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"config.json must be a JSON object, one entry for each field: {error}."
            ) from None
        retired = [k for k, default in _RETIRED.items() if values.pop(k, default) != default]
        if retired:
            warnings.warn(
                f"config.json holds {', '.join(retired)}, which towers decides by itself now. The "
                "results stay the same, bit for bit.", stacklevel=2,
            )
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            raise ValueError(
                f"config.json holds {fields.shown(unknown)}, which this version of towers does "
                "not know. Use the version that wrote it, or remove the entry."
            )
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None


def fields_with(roles: Role) -> tuple[str, ...]:
    """The names of the fields that have any of these roles."""
    return fields.names(TrainConfig, roles)


TrainConfig.__doc__ = "\n".join([
    f"{TrainConfig.__doc__}\n\n    Args:",
    *(f"        {f.name}: {fields.help_of(TrainConfig, f)}"
      for f in dataclasses.fields(TrainConfig)),
])
