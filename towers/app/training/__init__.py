"""Builds a run of train.py, restores its checkpoint, and checks that its workers agree."""
