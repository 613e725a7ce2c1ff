"""The price of one plan: the time of a step and its parts, and the memory of every pp rank."""
