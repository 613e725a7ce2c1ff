"""Builders of schedules: each file builds one, as a pure function."""
