"""Launches the workers of one run as processes on this machine, each with its TF_CONFIG."""
