"""Writes a run's lines, charts and files for its user."""
