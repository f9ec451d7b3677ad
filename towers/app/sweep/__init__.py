"""Sweeps over global batches and GPU counts: sweep.csv, sweep.png and one sentence of advice."""
