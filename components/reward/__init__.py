"""The reward model: Bradley-Terry training, calibration, the scale of scores."""
