"""TrainConfig: everything that defines a run; frozen, validated, no flags."""

import dataclasses
import json
import re
import warnings
from typing import Any, ClassVar

from towers.app import fields
from towers.app.class_weight import as_text
from towers.machine import choices
from towers.app.fields import Role, choice, count, number, part, shown, spelled, switch, text

DEFAULT_BATCH_SIZE = 128
LARGEST_SEED = 2**32 - 1  # NumPy's limit, which keras.utils.set_random_seed passes on
# Of what a computation is made of: beyond these it would not end, or not begin.
_MOST_DEVICES, _MOST_TOWERS, _MOST_EXAMPLES = 1024, 65_536, 2**31 - 1
_LONGEST_WAIT = 1_000_000  # seconds: the system's own limit is not much above
AUTO = "auto"
WARN = "warn"
# Fields of older config.json files, with their defaults: the device policy decides these now.
_RETIRED = {"inline_towers": False, "pack_transfers": AUTO, "prefetch_to_devices": None}
SCHEDULES = ("constant", "cosine", "linear")  # and step:E1,E2


def _check_image_size(name: str, value: str) -> None:
    if not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(x[13])?", value):
        raise ValueError(
            f"{name} ({shown(value)}) must be HEIGHTxWIDTH, each from 1 to 99999, or "
            "HEIGHTxWIDTHxCHANNELS, 1 (gray) or 3 (color), such as 224x224x3."
        )


def _checked_schedule(name: str, value: Any) -> str:
    step_epochs(value)
    return value  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run. Each field is a flag of train.py, and its text that flag's help."""

    # What is trained, and on what.
    model: str = text(
        "cnn", "cnn, notebook_cnn, mlp, gru, gru_large, lstm, lstm_large, resnet, resnet20, "
        "resnet56, resnet50; package.module:function (input_shape, num_classes), or without "
        "arguments, -> a Keras model; or FILE.keras, which is trained further. A compiled one "
        "brings its own loss, metrics and optimizer. The default trains in minutes.", is_path=True)
    dataset: str = text(
        "mnist", "mnist, fashion_mnist, cifar10, music, image_folder, npz, synthetic, "
        "array_record, tfrecord; tfds:NAME, of TensorFlow Datasets; or package.module:function -> "
        "(train, test). The default needs "
        "no download.")
    data_dir: str | None = text(
        None, "Directory of the data set's files; for npz, the file. Beside `resume`, the place to "
        "which the same data have moved. Default: the data set's own place.",
        Role.FREE | Role.LOCAL, is_path=True)
    image_size: str | None = text(
        None, "Of image_folder: HEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS, such as 224x224x3, of all "
        "images. Default: what most of those to train on have.", check=_check_image_size)
    features: str | None = text(
        None, "Of array_record and tfrecord: package.module:function, one record -> (x, y). "
        "Default: none, for these need one.")
    data_workers: int = count(
        0, "Processes that read a source with __len__ and __getitem__; they change no bit. "
        "Default: 0, a thread of this process, which needs no copies.", Role.FREE | Role.LOCAL,
        at_least=0, at_most=1024)
    data_timeout: float = number(
        300.0, "Seconds that one example of such a source may take. The default outlasts a network "
        "disk's hiccups.", Role.FREE | Role.LOCAL, example="300", most_seconds=_LONGEST_WAIT)
    shuffle_buffer: int = count(
        10_000, "Examples among which a tf.data.Dataset that memory does not hold is shuffled; "
        "they are held there. More mix better.", at_most=_MOST_EXAMPLES)
    augment: str | None = text(
        None, "Change each training example at random: crop_flip; layers of Keras by name, such as "
        "RandomFlip,RandomRotation(0.1),MixUp; or package.module:function (x, seed) -> x, or -> a "
        "Keras layer. Default: nothing.")

    # What runs where.
    num_gpus: int | None = count(
        None, "Devices that run towers. With a fixed `num_towers` it changes no bit of the "
        "results. Default: all GPUs; without any, one logical CPU device a core.",
        Role.FREE | Role.LOCAL | Role.BEGINNING, at_most=_MOST_DEVICES)
    logical_gpus: int | None = count(
        None, "Divide the GPUs into so many, of equal memory, to rehearse a run with fewer: real "
        "kernels and copies, not their speed. Default: each is one.",
        Role.FREE | Role.LOCAL | Role.BEGINNING, at_most=_MOST_DEVICES)
    num_towers: int | None = count(
        None, "Towers, over all devices. They define the run: give their number to get the same "
        "bits on any number of devices. Default: one for each device.", Role.BEGINNING,
        at_most=_MOST_TOWERS)
    accumulate: int | None = count(
        None, "Towers on each device, computed one after the other, in place of `num_towers`: the "
        "gradient of a batch that needs so many times the memory. Default: one.",
        Role.BEGINNING, at_most=1024)
    device: str = choice(
        "auto", ("auto", "gpu", "cpu"), "What towers run on. The default takes GPUs when there are "
        "any.", Role.FREE | Role.LOCAL | Role.BEGINNING)
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
        "larger. Default: 128, the Keras convnet's.",
        at_most=_MOST_EXAMPLES)
    batch_size_per_gpu: int | None = count(
        None, "Examples of one update on each device, instead of `batch_size`. Default: "
        "`batch_size` divided among the towers.", at_most=_MOST_EXAMPLES)
    jit_compile: bool | str = switch(
        AUTO, "Compile each tower with XLA: it takes long to start, and mostly pays on GPUs. auto: "
        "as Keras decides, on GPUs where every layer supports it, or as a compiled model says; on "
        "CPUs small recurrent models.",
        word=AUTO)
    cpu_threads: int | None = count(
        None, "Threads of each operation on a CPU; they change the last bits of the results. "
        "Default: the cores divided among the towers; one for each that XLA compiles, up to the "
        "cores.", Role.BEGINNING, at_most=65_536)
    worker_timeout: float = number(
        60.0, "Of several workers: seconds after which one is lost that does not answer, or lets "
        "the others wait; all end.", Role.FREE, example="60", most_seconds=_LONGEST_WAIT)
    hang_timeout: float | str = number(
        AUTO, "Of a single worker, after its first step: seconds without progress, be it a step, a "
        "read batch or a written file, after which the run says where it hangs and ends with exit "
        "code 4. 0: never. auto: 10 times the longest so far, at least 5 minutes and more than "
        "`data_timeout`.", Role.FREE | Role.LOCAL, example="300", most_seconds=_LONGEST_WAIT,
        word=AUTO)

    # How long, and how the parameters change, and which.
    epochs: int = count(
        12, "Passes over the training data; 0 evaluates only. Default: 12, after which the Keras "
        "convnet reaches 0.99 on MNIST.", Role.LIMIT, at_least=0)
    max_steps: int | None = count(
        None, "Updates after which the run ends, even in mid-epoch. Default: no limit.",
        Role.LIMIT)
    optimizer: str | None = text(
        None, "A Keras optimizer: adam, sgd, rmsprop, ... Default: the model's own.",
        Role.OPTIMIZER)
    learning_rate: float | None = number(
        None, "Of the one update with the averaged gradient; independent of the number of towers. "
        "Default: the optimizer's own.", Role.OPTIMIZER, example="0.001")
    schedule: str = spelled(
        "constant", "What becomes of the learning rate over `epochs` (or `max_steps`): constant; "
        "cosine or linear, to 0; or step:30,60, a tenth after each of these epochs. The default "
        "can be changed by callbacks.", Role.OPTIMIZER, check=_checked_schedule)
    warmup_steps: int = count(
        0, "Updates over which the learning rate rises from 0, before `schedule`. Default: none.",
        Role.OPTIMIZER, at_least=0)
    weight_decay: float | None = number(
        None, "Keras', of every trainable variable in each update: w -= learning rate * "
        "weight_decay * w. Default: the optimizer's own, mostly none.", Role.OPTIMIZER,
        example="0.0001")
    momentum: float | None = part(
        None, "Of sgd or rmsprop. Default: the optimizer's own, mostly none.", Role.OPTIMIZER,
        example=0.9)
    clip_norm: float | None = number(
        None, "The largest norm of all averaged gradients together; larger ones are scaled down. "
        "Default: no limit.", Role.OPTIMIZER, example="1.0")
    ema: float | None = part(
        None, "Momentum, such as 0.999, of an average of each variable over the updates, which "
        "final.keras holds in the variable's place. Default: none.", Role.OPTIMIZER, example=0.999)
    label_smoothing: float | None = part(
        None, "The part of each label that is spread over all classes, such as 0.1. Default: none.",
        example=0.1)
    class_weight: str | None = spelled(
        None, "What an example of each class counts in the loss, as in Keras' fit: 0:1,1:5, a "
        "class that is not named 1; or balanced, so that each class counts as much as any other. "
        "Default: all count 1.", check=lambda name, value: as_text(value))
    dropout: float | None = part(
        None, "Rate of every Dropout layer, 0 for none. Default: the model's own rates.",
        example=0.25)
    batch_norm: str | None = choice(
        None, ("average", "synchronized", "tower0"), "How the towers' BatchNormalization "
        "statistics become one. Default: average, with a warning where such a layer is trained.")
    freeze: str | None = text(
        None, "A regular expression, such as ^(conv1|bn)/: layers stay as they are, frozen as in "
        "Keras, where it is found in the paths of all their variables. Default: none.",
        Role.BEGINNING,
        check=fields.regular_expression)
    init_from: str | None = text(
        None, "A .keras file, whose values the variables of the same names and shapes begin with. "
        "Default: all begin at random.", Role.BEGINNING, is_path=True)
    seed: int = count(
        0, "Of the parameters, the order of the examples and dropout. The default is fixed, so "
        "that a run can be repeated.", at_least=0, at_most=LARGEST_SEED)
    precision: str = choice(
        "float32", ("float32", "mixed_float16", "mixed_bfloat16"), "Keras' dtype policy, of all "
        "towers. The default is exact to float rounding.")
    deterministic: bool = switch(
        False, "Use only kernels that give the same bits twice, and refuse operations that have "
        "none. Off by default: it costs speed on GPUs, and on CPUs alone the bits are the same "
        "without it.")
    nonfinite: str = choice(
        "stop", ("stop", "skip"), "What a NaN or infinite loss or gradient does: end the run "
        "before the update, or leave that update out and count it.", Role.FREE)

    # What a run leaves, and who is told of it.
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
        False, "With `resume`, `evaluate` or `predict`, import modules that the run's config.json "
        "names from the run's own directory, too: it runs what whoever wrote them wants.",
        Role.FREE | Role.ONCE | Role.LOCAL)
    checkpoint_every: int | None = count(
        None, "Updates from one checkpoint to the next, beside each epoch's end. Default: at least "
        "one every 10 minutes.", Role.FREE | Role.LOCAL)
    monitor: str | None = text(
        None, "The column of results.csv that makes an epoch the best, whose model best.keras "
        "holds. Default: val_accuracy, or val_loss where there is none.")
    monitor_mode: str = choice(
        "auto", ("auto", "min", "max"), "Whether the lowest or the highest `monitor` is the best. "
        "The default is what Keras knows of the metric.")
    callbacks: str | None = text(
        None, "package.module:function -> a list of Keras callbacks, which are told of every step "
        "and epoch. Default: none.")
    early_stopping: int | None = count(
        None, "Epochs without a better `monitor` after which the run ends. Default: never.",
        Role.LARGER)
    tensorboard: bool = switch(
        False, "Write each epoch's scalars to tensorboard/ in the run's directory. Off by "
        "default: results.csv and results.png hold the scalars.", Role.FREE | Role.LOCAL)
    histograms: bool = switch(
        False, "With `tensorboard`, the parameters' histograms each epoch. Off by default: they "
        "take time and room.", Role.FREE | Role.LOCAL)

    # What is looked at, instead of training or before; and what is made of the trained model.
    verify_gradients: bool | str = switch(
        False, "Compare the averaged gradient with the large-batch gradient on the first batch, "
        "then train; where they differ, name the loss or layer and end before the first update, "
        "or, with =warn, train all the same. Off by default: it takes the memory of a whole global "
        "batch on one device.", Role.ONCE, word=WARN)
    profile: bool = switch(
        False, "Time a step and its parts, name what bounds it and what to change, and leave a "
        "trace for TensorBoard; train nothing.", Role.ONCE)
    plan: bool = switch(
        False, "Print devices, towers, shard sizes, the bytes and sends of each step; train "
        "nothing.", Role.ONCE)
    export: str | None = text(
        None, "What a model becomes for those without towers: a new NAME.onnx, NAME.tflite "
        "(LiteRT), or the directory of a SavedModel. It is the model of the run's end, also of a "
        "complete run with `resume`, or of the file of `evaluate` or `predict`. Default: none.",
        Role.FREE | Role.ONCE | Role.LOCAL, is_path=True)
    export_pixels: bool = switch(
        False, "With `export`, the exported model takes uint8 images, 0 to 255, and divides them "
        "by 255 itself, as the run did. Off by default: it takes what the trained model takes.",
        Role.FREE | Role.ONCE | Role.LOCAL)

    named: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **given: Any) -> "TrainConfig":
        """Notes which fields are given: a default that somebody names is his choice."""
        config = super().__new__(cls)
        object.__setattr__(config, "named", frozenset(given))
        return config

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value makes no sense, or two values contradict each other.
        """
        for name, value in fields.checked(self):
            object.__setattr__(self, name, value)
        self._check_together()

    def global_batch_size(self, num_devices: int) -> int:
        """The examples of one update, given how many devices run towers."""
        if self.batch_size_per_gpu is not None:
            return self.batch_size_per_gpu * num_devices
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    def given(self) -> dict[str, Any]:
        """The fields that somebody has set: to another value than the default, or to it by name.

        `dataclasses.replace` and `from_json` name all fields: there only the former are known. None
        is how a script leaves a field to its default.
        """
        all_fields = {field.name: field.default for field in dataclasses.fields(self)}
        chosen = self.named if self.named < all_fields.keys() else ()
        return {
            name: getattr(self, name) for name, default in all_fields.items()
            if getattr(self, name) != default or name in chosen and default is not None
        }

    @property
    def stage_names(self) -> list[str] | None:
        """`stages`, apart."""
        return None if self.stages is None else [name.strip() for name in self.stages.split(",")]

    def num_towers_on(self, num_devices: int) -> int:
        """The towers, given how many devices run them."""
        return self.num_towers or num_devices // self.gpus_per_tower * (self.accumulate or 1)

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
        """The configuration that `to_json` wrote.

        Raises:
            ValueError: this is no such JSON, a field is unknown, or a value makes no sense.
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise ValueError(f"config.json is not JSON: {error}.") from None
        except RecursionError:
            raise ValueError("config.json is not JSON: it nests too deeply.") from None
        if not isinstance(values, dict):
            raise ValueError("config.json must hold an object, one entry for each field.")
        for name, default in _RETIRED.items():
            if values.pop(name, default) != default:
                warnings.warn(
                    f"config.json: {name} is no longer an option, and is ignored. The results stay "
                    "the same, bit for bit.", stacklevel=2,
                )
        unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
        if unknown:
            names = ", ".join(name[:40] for name in unknown[:8])
            raise ValueError(
                f"config.json holds {names}, which this version of towers does not know. Use "
                "the version that wrote it, or remove the entry."
            )
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"config.json: {error}") from None

    def _check_together(self) -> None:
        if self.batch_size is not None and self.batch_size_per_gpu is not None:
            raise ValueError(
                f"batch_size ({self.batch_size}) is the global batch and batch_size_per_gpu "
                f"({self.batch_size_per_gpu}) one device's: give only one of them."
            )
        if self.logical_gpus is not None and self.device == "cpu":
            raise ValueError(
                f"logical_gpus ({self.logical_gpus}) divides GPUs, and device=cpu uses none: "
                "give only one of them."
            )
        if self.strategy == choices.ASYNC:
            raise ValueError(choices.ASYNC_REFUSED)
        if self.histograms and not self.tensorboard:
            raise ValueError("`histograms` needs `tensorboard`, which shows them.")


def fields_with(roles: Role) -> tuple[str, ...]:
    """The names of the fields that have any of these roles."""
    return fields.names(TrainConfig, roles)


TrainConfig.__doc__ = "\n".join([
    f"{TrainConfig.__doc__}\n\n    Args:",
    *(f"        {f.name}: {fields.help_of(TrainConfig, f)}"
      for f in dataclasses.fields(TrainConfig)),
])


def step_epochs(schedule: str) -> list[int]:
    """[30, 60] of "step:30,60"; [] of a schedule without steps.

    Raises:
        ValueError: there is no such schedule.
    """
    if schedule in SCHEDULES:
        return []
    kind, _, text = schedule.partition(":") if isinstance(schedule, str) else ("", "", "")
    parts = text.split(",")
    epochs = [int(part) for part in parts if part.isdecimal() and len(part) < 19]
    is_ascending = all(a < b for a, b in zip([0, *epochs], epochs, strict=False))
    if kind != "step" or len(epochs) != len(parts) or not is_ascending:
        raise ValueError(
            f"schedule ({shown(schedule)}) must be one of {', '.join(SCHEDULES)}, or step:30,60: "
            "the epochs, in ascending order, after which the learning rate is a tenth."
        )
    return epochs
