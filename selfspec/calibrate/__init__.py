"""Calibration: trains exits for one model on text it writes itself, measures them, and chooses what to draft with."""
