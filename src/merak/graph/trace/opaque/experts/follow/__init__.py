"""Steps of a module that loops over experts, as they treat every expert's rows."""
