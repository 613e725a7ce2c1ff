"""Schedules by name: each file builds one, as a pure function."""
