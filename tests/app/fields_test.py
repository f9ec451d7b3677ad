"""A field is declared once: its flag, its help and what becomes of it on --resume follow."""

import dataclasses
import re

import pytest

from towers.app import fields
from towers.app.continued import continued_config, identity
from towers.resume.run_dir import CONFIG
from towers.app.config import TrainConfig

FIELDS = dataclasses.fields(TrainConfig)


def another(field):
    """A value that is neither the default nor one that is refused."""
    says = fields.declared(field)
    special = {"schedule": "cosine", "class_weight": "0:1,1:5", "image_size": "8x8x1",
               "strategy": "mirrored"}
    return special.get(field.name) or {
        "text": "other", "count": 7, "number": 0.5, "switch": not field.default,
        "choice": says.words and says.words[-1],
    }[says.kind]


def test_resume_lets_change_what_its_help_names_and_nothing_else(tmp_path):
    (tmp_path / CONFIG).write_text(TrainConfig(early_stopping=3, tensorboard=True).to_json())
    free = set()
    for field in FIELDS:
        if field.name != "resume":
            try:
                continued_config(str(tmp_path), {field.name: another(field)})
                free.add(field.name)
            except ValueError as error:
                assert f"cannot change {field.name} (" in str(error)
    help = fields.help_of(TrainConfig, next(f for f in FIELDS if f.name == "resume"))
    assert free | {"tensorboard"} == set(re.findall(r"`(\w+)`", help)) - {"resume", "run_dir"}


def test_what_may_change_on_resume_is_no_part_of_a_runs_identity():
    roles = fields.Role.FREE | fields.Role.LIMIT | fields.Role.LARGER | fields.Role.ONCE
    assert set(identity(TrainConfig())) | set(fields.names(TrainConfig, roles)) == {
        field.name for field in FIELDS
    }


def test_the_text_of_the_configuration_is_the_help_of_all_its_fields():
    for field in FIELDS:
        help = fields.help_of(TrainConfig, field)
        assert help.endswith(".") and f"    {field.name}: {help}" in TrainConfig.__doc__


def test_a_declaration_with_another_default_or_check_is_all_that_a_field_needs():
    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int | str = fields.count(3, "Columns.", at_most=5, word="auto")
        name: str | None = fields.text(None, "See `width`.", check=fields.regular_expression)

        def __post_init__(self):
            for name, value in fields.checked(self):
                object.__setattr__(self, name, value)

    assert Config() == Config(width=3, name=None) and Config(width="auto").width == "auto"
    for values, message in (
        ({"width": 6}, r"width \(6\) must be at most 5"), ({"width": None}, "a whole number"),
        ({"name": "("}, "no regular expression"), ({"name": ""}, "`name` is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            Config(**values)
