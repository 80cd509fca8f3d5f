"""Models that a group of processes shares."""
