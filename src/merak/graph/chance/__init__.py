"""What a model draws while it runs: choices of what to leave out, masks drawn with NumPy."""
