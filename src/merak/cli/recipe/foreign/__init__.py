"""Training files of other tools, read as recipes."""
