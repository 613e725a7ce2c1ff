"""`merak report`: the page of a run."""
