"""Local ranks started and ended by the command line."""
