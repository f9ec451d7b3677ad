"""Finds and configures the machine's devices, and handles signals, hangs and the terminal."""
