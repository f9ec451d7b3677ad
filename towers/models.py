"""Exports the built-in models under a public name; their code is in towers/app/models."""

from towers.app.models import NAMES, ModelSource, load, load_file

__all__ = ["NAMES", "ModelSource", "load", "load_file"]
