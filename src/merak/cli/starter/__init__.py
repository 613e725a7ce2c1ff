"""The folder that `merak init` writes: a recipe and a script to start from."""
