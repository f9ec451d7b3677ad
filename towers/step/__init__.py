"""Holds the arrows of the diagram: how a batch is split, and sums are made and sent."""
