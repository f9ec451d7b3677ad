"""Reads examples one by one, also in processes; it does not import TensorFlow."""
