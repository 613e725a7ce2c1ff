"""Display of a running job on rank 0: a panel in a terminal, lines elsewhere."""
