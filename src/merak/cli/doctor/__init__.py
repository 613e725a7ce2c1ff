"""`merak doctor`."""
