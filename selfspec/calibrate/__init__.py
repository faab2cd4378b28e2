"""Calibration: trains an exit (or several) for a model on text that it writes, measures it, and chooses what to draft
with."""
