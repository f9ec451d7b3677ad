"""Manages run directories and checkpoints, and resumes runs and fits from them."""
