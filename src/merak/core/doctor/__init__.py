"""Checks of what a job needs on one host: software, devices, network, limits, memory, folders."""
