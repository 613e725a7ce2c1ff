"""Reads of Python state: values that a trace took as constants, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass

MODEL, GLOBALS, LOSS = "model", "globals", "loss"
"""Roots of a read: a module of the model, the globals of a Python module, the loss function."""

CONTEXT = "get()"
"""Step from a context variable to its value."""


@dataclass(frozen=True, slots=True)
class StateRead:
    """A read of a plain Python value, such as a number or a text, while a model was traced.

    Args:
        root: `MODEL`, `GLOBALS` or `LOSS`.
        path: of the module inside the model, or of the Python module; "" for the loss function.
        steps: from there to the value: an attribute's name, "[key]" for an item of a dict,
            "(name)" for a variable of a function's closure, `CONTEXT` for a context variable's.
        source: the line that read it, as "file:number".
    """

    root: str
    path: str
    steps: tuple[str, ...]
    source: str

    def __str__(self) -> str:
        text = {MODEL: "model", GLOBALS: self.path, LOSS: "the loss function"}[self.root]
        if self.root == MODEL and self.path:
            text += f".{self.path}"
        for step in self.steps:
            is_item = step.startswith("[") and (self.root != GLOBALS or step != self.steps[0])
            key = step.strip("[]()")
            text += f"[{key if key.isdecimal() else repr(key)}]" if is_item else f".{key}"
        return text
