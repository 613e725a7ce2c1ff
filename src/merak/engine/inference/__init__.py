"""Calls of a model that no rank has whole: its own Python code runs, where its weights are."""

from merak.engine.inference.callable_model import callable_model

__all__ = ["callable_model"]
