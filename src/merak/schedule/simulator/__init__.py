"""Simulation of a schedule: start times, idle time, memory, and the timeline of it all."""
