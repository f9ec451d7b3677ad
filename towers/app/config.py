"""Defines TrainConfig, the frozen and validated configuration of a run."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, ClassVar

from towers.app import fields
from towers.app.class_weight import as_text
from towers.app.fields import Role, value_error
from towers.app.machine_fields import AUTO, MachineFields
from towers.app.training_fields import TrainingFields
from towers.machine.argument_names import unknown_argument


MADE_WITH = "made_with"  # in config.json: the digest of the traced step, and versions


def _stages_as_text(value: Any) -> object:
    """Returns "a,b" for the layer names ["a", "b"]; other values stay."""
    are_names = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    if are_names and any("," in each for each in value):
        raise value_error("stages", value, "a list of layer names without commas")
    return ",".join(value) if are_names else value


def _counts_as_text(value: Any) -> object:
    """Returns "3,1" for [3, 1]; other values stay."""
    are_counts = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    return ",".join(map(str, value)) if are_counts else value


def _size_as_text(value: Any) -> object:
    """Returns "224x224" for (224, 224); other values stay."""
    are_sizes = isinstance(value, list | tuple) and all(type(each) is int for each in value)
    return "x".join(map(str, value)) if are_sizes else value


def _schedule_as_text(value: object) -> object:
    """Returns "step:30,60" for {"step": [30, 60]}; other values stay."""
    if isinstance(value, dict) and list(value) == ["step"]:
        epochs = value["step"]
        are_epochs = isinstance(epochs, list | tuple) and all(type(each) is int for each in epochs)
        return f"step:{','.join(map(str, epochs))}" if are_epochs else value
    return value


# Flags are texts; in Python, the same fields also take lists and dicts.
_AS_TEXT = {
    "class_weight": as_text,
    "image_size": _size_as_text,
    "schedule": _schedule_as_text,
    "stages": _stages_as_text,
    "towers_per_device": _counts_as_text,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig(TrainingFields, MachineFields):  # the fields of the last base come first
    """Describes a training run. Each field is a flag of train.py with the same help text."""

    named: ClassVar[frozenset[str]] = frozenset()

    def __new__(cls, **given: object) -> "TrainConfig":
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
        if self.towers_per_device is not None and self.accumulate is not None:
            raise ValueError(
                f"accumulate ({self.accumulate}) and towers_per_device ({self.towers_per_device}) "
                "both say how many towers a device has: give only one of them."
            )
        if self.towers_per_device is not None and self.num_towers == AUTO:
            raise ValueError(
                f"num_towers=auto chooses how many towers a device has, and towers_per_device "
                f"({self.towers_per_device}) says it: give only one of them."
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
        groups, counts = num_devices // self.gpus_per_tower, self.tower_counts
        if self.num_towers is None and counts is not None:  # all workers have the same devices
            return sum(counts) * max(1, groups // len(counts))
        return self.fixed_towers or groups * (self.accumulate or 1)

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
            name: getattr(self, name)
            for name, default in defaults.items()
            if getattr(self, name) != default or name in chosen and default is not None
        }

    @property
    def stage_names(self) -> list[str] | None:
        """Returns the layer names in `stages` as a list, or None without `stages`."""
        return None if self.stages is None else [name.strip() for name in self.stages.split(",")]

    @property
    def fixed_towers(self) -> int | None:
        """Returns the number in `num_towers`, or None without one and with auto."""
        return None if isinstance(self.num_towers, str) else self.num_towers

    @property
    def tower_counts(self) -> list[int] | None:
        """Returns the numbers in `towers_per_device`, or None without numbers."""
        text = self.towers_per_device
        return None if text in (None, AUTO) else list(map(int, text.split(",")))

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

    def to_json(self, made_with: Mapping[str, str] | None = None) -> str:
        """Returns the configuration as JSON with one field on each line.

        made_with: further values for a reader, which `from_json` ignores.
        """
        more = {MADE_WITH: dict(made_with)} if made_with else {}
        return json.dumps({**dataclasses.asdict(self), **more}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Reads the configuration that `to_json` wrote."""
        known = {field.name for field in dataclasses.fields(cls)}
        try:
            values = {k: v for k, v in json.loads(text).items() if k in known or v is not None}
            values.pop(MADE_WITH, None)
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


TrainConfig.__doc__ = "\n".join(
    [
        f"{TrainConfig.__doc__}\n\n    Args:",
        *(
            f"        {f.name}: {fields.help_of(TrainConfig, f)}"
            for f in dataclasses.fields(TrainConfig)
        ),
    ]
)
