"""Rules that every schedule, and the steps lowered from it, must obey."""
