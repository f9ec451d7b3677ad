"""A run of train.py: its model, data and step, its epochs, and what runs beside its steps."""
