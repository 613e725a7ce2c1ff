"""Liveness of ranks: heartbeats, the watchdog, timeouts, interrupts and the report of a failure."""
