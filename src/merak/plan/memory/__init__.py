"""The memory model: what a rank holds while it runs its steps."""
