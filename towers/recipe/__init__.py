"""What a configuration makes of the model and its optimizer before training."""
