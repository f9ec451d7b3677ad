"""A run's directory, what a checkpoint in it holds, and how a run goes on from there."""
