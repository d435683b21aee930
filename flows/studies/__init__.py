"""Studies: sets of runs that share their stages, such as a sweep over options and seeds."""
