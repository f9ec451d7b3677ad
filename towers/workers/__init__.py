"""Connects the processes of one run: finds them, exchanges data, detects lost ones."""
