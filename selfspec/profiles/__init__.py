"""What calibration measured, and which domain a prompt belongs to."""
