"""The plan of a trainer's job: searched for its model and batches, or followed from a file."""
