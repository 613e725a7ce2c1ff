"""Progress of a running job: its figures, their display on rank 0, and the record of the run."""
