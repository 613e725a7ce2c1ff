"""The search for the best plan of a job on a cluster."""
