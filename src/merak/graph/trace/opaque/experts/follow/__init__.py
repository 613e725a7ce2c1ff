"""What a module that loops over experts does with every expert's rows, step by step."""
