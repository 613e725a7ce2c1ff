"""Opaque modules and functions: recorded as one operator where they cannot be traced."""
