"""Cost of operators and segments on a device: seconds, bytes, and saved activations."""
