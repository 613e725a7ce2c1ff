"""Expected figures of a laid-out job: times of its stages, peak speed, and its record."""
