"""What segments run, kernel by kernel, and the seconds of a kernel."""
