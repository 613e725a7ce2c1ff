"""Context parallelism: the tokens of each sample are shared by several ranks."""
