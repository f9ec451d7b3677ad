"""The built-in models, by their public name; the code is in towers/app/models."""

from towers.app import models as _models
from towers.app.models import NAMES, ModelSource, load, load_file

__all__ = ["NAMES", "ModelSource", "load", "load_file"]
__path__ = _models.__path__  # so that --model=towers.models.gru:build_large is found
