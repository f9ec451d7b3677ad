"""Answers about a step: where everything is, whether it is right, where its time goes."""
