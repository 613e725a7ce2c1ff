"""What every other room stands on: errors, the mesh of ranks, collectives, random state."""
