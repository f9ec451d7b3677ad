"""One synchronous update, the diagram: one file an arrow, and what these need."""

from towers.step.tower_step import TowerStep

__all__ = ["TowerStep"]
