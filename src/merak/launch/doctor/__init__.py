"""Checks of ranks together: rendezvous, collectives, links, clocks, differences of hosts."""
