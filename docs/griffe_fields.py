"""For the site's reference: `TrainConfig` as it is at run time, its fields' defaults and help.

Griffe reads the code without running it: there a field's default is the call that declares it, and
the docstring has no fields yet.
"""

import dataclasses
import inspect
import re
from typing import Any

import griffe

from towers.app.config import TrainConfig

_PATH = f"{TrainConfig.__module__}.{TrainConfig.__name__}"
_DEFAULTS = {field.name: repr(field.default) for field in dataclasses.fields(TrainConfig)}


class Fields(griffe.Extension):
    """Gives the class its docstring with all fields, and each argument its field's default."""

    def on_class(self, *, cls: griffe.Class, **kwargs: Any) -> None:
        if cls.path == _PATH and cls.docstring is not None:
            cls.docstring.value = as_markdown(inspect.getdoc(TrainConfig) or "")
            for parameter in cls.parameters:
                parameter.default = _DEFAULTS.get(parameter.name)


def as_markdown(text: str) -> str:
    """Plain text, but for `code` in backquotes, as Markdown that shows its "<" and "__"."""
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [part.replace("<", "&lt;").replace("__", r"\_\_") for part in parts[::2]]
    return "".join(parts)
