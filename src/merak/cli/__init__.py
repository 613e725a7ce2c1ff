"""Command line: thin commands over the same functions that scripts use."""
