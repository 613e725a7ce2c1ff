"""Cost of operators and segments on a device: seconds, bytes, and what is saved for backward."""
