"""Reads examples one by one, in a thread or in processes; it does not import TensorFlow."""
