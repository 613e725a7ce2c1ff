"""One file for each framework of the side-by-side comparison; each runs in its own Python."""
