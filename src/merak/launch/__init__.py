"""Launch of local ranks for the command line."""
