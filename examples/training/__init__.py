"""Training that is more than one loss of one batch; each file is the code of a page of the docs."""
