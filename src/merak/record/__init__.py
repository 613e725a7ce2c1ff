"""Record of a run: what was laid out, what was logged, and the measured actions of a few steps."""
