"""Pipeline schedules as data: built, checked, simulated, drawn and lowered to an engine's steps."""
