"""Data of a recipe: where it is, and how it becomes samples of a model."""
