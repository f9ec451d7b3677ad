"""The model and optimizer that a configuration asks for, made before training."""
