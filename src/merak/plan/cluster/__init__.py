"""Devices of a job that need not be here, and the links between them."""
