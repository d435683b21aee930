"""How far a reward model can be believed: calibration, slices, length, probes."""
