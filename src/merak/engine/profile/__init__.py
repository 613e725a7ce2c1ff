"""Measurements of a job's own devices, links and segments, for a profile."""
