"""What a laid-out job is expected to take: times of its stages, peak speed, and its record."""
