"""TrainConfig: everything that defines a run; frozen, validated, no flags."""

import dataclasses
import json
import os
import re
import reprlib
import sys
from typing import Any

from towers.class_weight import as_text

DEFAULT_BATCH_SIZE = 128
LARGEST_SEED = 2**32 - 1  # NumPy's limit, which keras.utils.set_random_seed passes on

_PARTS = {"dropout": 0.25, "momentum": 0.9, "ema": 0.999, "label_smoothing": 0.1}
_CHOICES = {
    "device": ("auto", "gpu", "cpu"),
    "variable_device": ("cpu", "gpu"),
    "precision": ("float32", "mixed_float16", "mixed_bfloat16"),
    "batch_norm": ("average", "synchronized", "tower0"),
    "monitor_mode": ("auto", "min", "max"),
    "nonfinite": ("stop", "skip"),
}
_TEXTS = (
    "model", "dataset", "run_dir", "resume", "data_dir", "optimizer", "monitor", "callbacks",
    "freeze", "init_from", "export", "features", "augment", "image_size",
)
_PATHS = ("model", "run_dir", "resume", "data_dir", "init_from", "export")
_SMALLEST = {
    "num_gpus": 1,
    "logical_gpus": 1,
    "num_towers": 1,
    "accumulate": 1,
    "batch_size": 1,
    "batch_size_per_gpu": 1,
    "epochs": 0,
    "max_steps": 1,
    "seed": 0,
    "checkpoint_every": 1,
    "cpu_threads": 1,
    "early_stopping": 1,
    "warmup_steps": 0,
    "data_workers": 0,
    "shuffle_buffer": 1,
}
_LARGEST = {  # of what a computation is made of: beyond them it would not end, or not begin
    "num_gpus": 1024,
    "logical_gpus": 1024,
    "num_towers": 65_536,
    "accumulate": 1024,
    "batch_size": 2**31 - 1,
    "batch_size_per_gpu": 2**31 - 1,
    "seed": LARGEST_SEED,
    "cpu_threads": 65_536,
    "data_workers": 1024,
    "shuffle_buffer": 2**31 - 1,
}
_LARGEST_COUNT = 2**63 - 1  # of any other: TensorFlow counts so far
_LONGEST_WAIT = 1_000_000  # seconds: the system's own limit is not much above
AUTO = "auto"
WARN = "warn"
SCHEDULES = ("constant", "cosine", "linear")  # and step:E1,E2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    model: a built-in name, "package.module:function", or FILE.keras.
    dataset: likewise.
    data_dir: where the data set's files are; None means the data set's own place.
    image_size: "HEIGHTxWIDTH" or "HEIGHTxWIDTHxCHANNELS" of all images of "image_folder"; None
        means what most of those to train on have.
    features: "package.module:function", what parses a record of "array_record" or "tfrecord".
    data_workers: processes that read a random-access source; 0 means a thread of this one.
    data_timeout: seconds that one example of such a source may take.
    shuffle_buffer: examples among which a tf.data.Dataset that memory does not hold is shuffled.
    augment: what changes each training example at random: "crop_flip", or
        "package.module:function"; None means nothing.
    num_gpus: how many devices run towers; None means all GPUs, or one CPU device a core.
    logical_gpus: how many the GPUs are divided into, to rehearse with fewer; None means not at all.
    num_towers: copies of the computation, each fed one shard; None means one for each device;
        "auto" the fewest for each device, of 1, 2, 4 ..., with which the first step fits into its
        memory.
    accumulate: towers of each device, which are computed one after the other, in place of
        num_towers; None means as num_towers says.
    device: what towers run on: "auto" (GPUs when there are any), "gpu" or "cpu".
    variable_device: where the parameters live, and are updated: "cpu" or "gpu".
    batch_size: examples of one update, over all towers; None means 128, or batch_size_per_gpu
        times the number of devices.
    batch_size_per_gpu: examples of one update on each device.
    epochs: passes over the training data; 0 evaluates only.
    max_steps: updates after which the run ends, even in mid-epoch; None means no limit.
    optimizer: a Keras name; None means the model's own.
    learning_rate: None means the optimizer's own default.
    schedule: what becomes of the learning rate over the run's epochs (or max_steps): "constant",
        "cosine" or "linear" (to 0), or "step:30,60" (a tenth after each of these epochs).
    warmup_steps: the first updates, over which the learning rate rises from 0.
    weight_decay: Keras', of every trainable variable: w -= learning rate * weight_decay * w.
    momentum: of optimizers that have such an argument.
    clip_norm: the largest norm of all averaged gradients together; None means no limit.
    ema: the momentum of the average of each trainable variable over the updates, which takes the
        variable's place at the end; None means no average.
    label_smoothing: the part of a label that is spread evenly over all classes.
    class_weight: what an example of each class counts in the loss, as in Keras' fit: "0:1,1:5", or
        {0: 1, 1: 5}, or "balanced"; of a class that is not named, 1.
    freeze: a regular expression; the variables in whose path it is found stay as they are.
    init_from: a .keras file whose values the variables of the same names and shapes begin with.
    dropout: the rate of every Dropout layer; None means the model's own rates.
    seed: of the parameters, the order of the examples, and dropout.
    precision: a Keras dtype policy.
    deterministic: only kernels that give the same bits twice, on GPUs, too.
    jit_compile: compile each tower with XLA.
    inline_towers: hand all towers to the graph optimizer as one graph.
    pack_transfers: move parameters and gradients between devices as one tensor a dtype.
    prefetch_to_devices: copy each tower's next shard to its device beside the step before; None
        means where there are GPUs.
    nonfinite: what a NaN or infinite loss or gradient does: "stop" the run, or "skip" the update.
    batch_norm: how the towers' BatchNormalization statistics become one.
    cpu_threads: of each operation on a CPU, which change the last bits; None means the cores
        divided among the towers.
    worker_timeout: seconds after which a worker is lost that does not answer, or lets others wait.
    run_dir: None means the next free runs/<model>-<dataset>-001.
    resume: the directory of a run to go on with; its config.json brings the other values. "auto":
        `run_dir`, where it holds a run; else one begins there.
    trust_run_dir: import what a run's config.json names from the run's own directory, too.
    checkpoint_every: updates from one checkpoint to the next, beside each epoch's end; None means
        at least one every 10 minutes.
    monitor: the column of results.csv that makes an epoch the best; None means val_accuracy, or
        val_loss where there is no such column.
    monitor_mode: whether its lowest ("min") or its highest value is the best; "auto": as Keras has
        it for the metric.
    callbacks: "package.module:function" -> Keras callbacks; None means none.
    early_stopping: epochs without a better one after which the run ends; None means never.
    tensorboard: write the epochs' scalars and the step's graph for TensorBoard.
    histograms: write the parameters' histograms, too, each epoch.
    verify_gradients: compare the averaged with the large-batch gradient on the first batch, and end
        the run before its first update where they differ; "warn" goes on all the same.
    profile: measure the phases of a step and what bounds them; train nothing.
    plan: print the devices, towers and transfers; train nothing.
    export: a new directory for the model at the end, as a SavedModel.
    """

    model: str = "cnn"
    dataset: str = "mnist"
    data_dir: str | None = None
    image_size: str | None = None
    features: str | None = None
    data_workers: int = 0
    data_timeout: float = 300.0
    shuffle_buffer: int = 10_000
    augment: str | None = None
    num_gpus: int | None = None
    logical_gpus: int | None = None
    num_towers: int | str | None = None
    accumulate: int | None = None
    device: str = "auto"
    variable_device: str = "cpu"
    batch_size: int | None = None
    batch_size_per_gpu: int | None = None
    epochs: int = 12
    max_steps: int | None = None
    optimizer: str | None = None
    learning_rate: float | None = None
    schedule: str = "constant"
    warmup_steps: int = 0
    weight_decay: float | None = None
    momentum: float | None = None
    clip_norm: float | None = None
    ema: float | None = None
    label_smoothing: float | None = None
    class_weight: str | None = None
    freeze: str | None = None
    init_from: str | None = None
    dropout: float | None = None
    seed: int = 0
    precision: str = "float32"
    deterministic: bool = False
    jit_compile: bool = False
    inline_towers: bool = False
    pack_transfers: bool = False
    prefetch_to_devices: bool | None = None
    nonfinite: str = "stop"
    batch_norm: str = "average"
    cpu_threads: int | None = None
    worker_timeout: float = 60.0
    run_dir: str | None = None
    resume: str | None = None
    trust_run_dir: bool = False
    checkpoint_every: int | None = None
    monitor: str | None = None
    monitor_mode: str = "auto"
    callbacks: str | None = None
    early_stopping: int | None = None
    tensorboard: bool = False
    histograms: bool = False
    verify_gradients: bool | str = False
    profile: bool = False
    plan: bool = False
    export: str | None = None

    def __post_init__(self) -> None:
        """
        Raises:
            ValueError: a value makes no sense, or two values contradict each other.
        """
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                shown = _shown(getattr(self, name))
                raise ValueError(f"{name} ({shown}) must be one of {', '.join(choices)}.")
        for name, smallest in _SMALLEST.items():
            if (name, getattr(self, name)) != ("num_towers", AUTO):
                _check_integer(name, getattr(self, name), smallest, _may_be_none(name))
        for field in dataclasses.fields(self):
            if field.type in (bool, bool | None):
                _check_switch(field.name, getattr(self, field.name))
        if self.verify_gradients != WARN:
            _check_switch("verify_gradients", self.verify_gradients, f" or {WARN!r}")
        for name in _TEXTS:
            object.__setattr__(self, name, _text(name, getattr(self, name)))
        _check_positive("learning_rate", self.learning_rate, "0.001")
        _check_positive("worker_timeout", self.worker_timeout, "60")
        _check_positive("data_timeout", self.data_timeout, "300")
        for name in ("worker_timeout", "data_timeout"):
            if getattr(self, name) > _LONGEST_WAIT:
                shown = _shown(getattr(self, name))
                raise ValueError(f"{name} ({shown}) must be at most {_LONGEST_WAIT} seconds.")
        _check_positive("weight_decay", self.weight_decay, "0.0001")
        _check_positive("clip_norm", self.clip_norm, "1.0")
        for name, example in _PARTS.items():
            _check_part(name, getattr(self, name), example)
        step_epochs(self.schedule)
        object.__setattr__(self, "class_weight", as_text(self.class_weight))
        _check_image_size(self.image_size)
        self._check_together()

    def global_batch_size(self, num_devices: int) -> int:
        """The examples of one update, given how many devices run towers."""
        if self.batch_size_per_gpu is not None:
            return self.batch_size_per_gpu * num_devices
        return DEFAULT_BATCH_SIZE if self.batch_size is None else self.batch_size

    @property
    def fixed_towers(self) -> int | None:
        """`num_towers`, where it is a number."""
        return self.num_towers if isinstance(self.num_towers, int) else None

    def num_towers_on(self, num_devices: int) -> int:
        """The towers, given how many devices run them; of "auto" the fewest."""
        return self.fixed_towers or num_devices * (self.accumulate or 1)

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
        if self.accumulate is not None and self.num_towers == AUTO:
            raise ValueError(
                f"accumulate ({self.accumulate}) is a number of towers a device, and "
                f"num_towers={AUTO} finds one: give only one of them."
            )
        try:
            re.compile(self.freeze or "")
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"freeze ({_shown(self.freeze)}) is no regular expression: {error}."
            ) from None
        if self.histograms and not self.tensorboard:
            raise ValueError("`histograms` needs `tensorboard`, which shows them.")


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
            f"schedule ({_shown(schedule)}) must be one of {', '.join(SCHEDULES)}, or step:30,60: "
            "the epochs, in ascending order, after which the learning rate is a tenth."
        )
    return epochs


def _check_image_size(text: str | None) -> None:
    if text is not None and not re.fullmatch(r"[1-9][0-9]{0,4}x[1-9][0-9]{0,4}(x[13])?", text):
        raise ValueError(
            f"image_size ({_shown(text)}) must be HEIGHTxWIDTH, each from 1 to 99999, or "
            "HEIGHTxWIDTHxCHANNELS, 1 (gray) or 3 (color), such as 224x224x3."
        )


def _may_be_none(name: str) -> bool:
    return getattr(TrainConfig, name) is None  # the class holds the fields' defaults


def _check_integer(name: str, value: Any, smallest: int, may_be_none: bool) -> None:
    if value is None and may_be_none:
        return
    if type(value) is not int:
        raise ValueError(f"{name} ({_shown(value)}) must be a whole number.")
    if value < smallest:
        raise ValueError(f"{name} ({_shown(value)}) must be at least {smallest}.")
    largest = _LARGEST.get(name, _LARGEST_COUNT)
    if value > largest:
        raise ValueError(f"{name} ({_shown(value)}) must be at most {largest}.")


def _check_switch(name: str, value: Any, or_else: str = "") -> None:
    if type(value) is not bool and not (value is None and _may_be_none(name)):
        raise ValueError(f"{name} ({_shown(value)}) must be True or False{or_else}.")


def _text(name: str, value: Any) -> str | None:
    """The field's text; of a path, with the user's home in the place of "~".

    Raises:
        ValueError: it is no text, or a text that names nothing.
    """
    if value is None and _may_be_none(name):
        return None
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(text, str):
        raise ValueError(f"{name} ({_shown(value)}) must be text.")
    if text == "":
        raise ValueError(f"`{name}` is empty; name one, or leave it out.")
    if "\0" in text:
        raise ValueError(f"{name} ({_shown(text)}) holds a zero character; leave it out.")
    return os.path.expanduser(text) if name in _PATHS else text


def _check_positive(name: str, value: Any, example: str) -> None:
    if value is None and _may_be_none(name):
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} ({_shown(value)}) must be a number.")
    if not 0 < value <= sys.float_info.max:
        shown = _shown(value)
        raise ValueError(f"{name} ({shown}) must be above 0 and finite, such as {example}.")


def _check_part(name: str, value: Any, example: float) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"{name} ({_shown(value)}) must be a number from 0 to below 1, such as {example}."
        )


def _shown(value: Any) -> str:
    """A value as Python writes it; of a long one, its beginning and its end."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    return short.repr(value)
