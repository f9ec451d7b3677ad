"""Traces a step once for the whole batch and divides it among towers, by rules."""
