"""Implements the commands: train.py and all other parts of towers outside the library."""
