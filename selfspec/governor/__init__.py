"""Chooses the plan of the next step."""
