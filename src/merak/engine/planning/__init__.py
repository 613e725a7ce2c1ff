"""Plans of a job that is there: its devices as a cluster, and the search on rank 0."""
