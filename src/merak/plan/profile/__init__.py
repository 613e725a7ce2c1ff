"""Profiles of a job's own devices and links: a versioned file, merged and compared."""
