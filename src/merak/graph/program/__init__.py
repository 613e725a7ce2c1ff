"""Programs: segments compiled to functions of this rank."""
