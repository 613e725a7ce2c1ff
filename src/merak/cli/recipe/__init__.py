"""Recipes: YAML files that describe a training job, and the job made from one."""
