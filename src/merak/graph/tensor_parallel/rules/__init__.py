"""Sharding rules: the placements that each operator can take."""
