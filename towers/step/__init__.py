"""Makes one synchronous update: each arrow of the diagram in step.py has a file here."""

from towers.step.tower_step import TowerStep

__all__ = ["TowerStep"]
