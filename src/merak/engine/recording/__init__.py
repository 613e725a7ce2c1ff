"""Recording of a run: its description before the first step, and what is measured later."""
