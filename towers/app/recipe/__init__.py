"""Changes a model and makes its loss and optimizer before training, as configured."""
