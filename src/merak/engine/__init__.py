"""Runs a rank's part of a schedule: builds its segments, computes, transfers, reduces."""
