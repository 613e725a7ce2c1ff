"""The state of a running step: its status, records, watchdog and out-of-memory guard."""
