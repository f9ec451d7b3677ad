"""What a run leaves and goes on from: its directory, its checkpoints."""
