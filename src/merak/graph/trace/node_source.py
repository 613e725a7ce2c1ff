"""Source lines and modules of the nodes of an exported graph."""

from __future__ import annotations

import re

from torch import fx

from merak.core.source_lines import is_library, is_tracing_code

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')


def frames_of(node: fx.Node) -> list[tuple[str, str]]:
    """File and line of every call around a node, outermost first, without Merak's own code."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return [frame for frame in frames if not is_tracing_code(frame[0])]


def line_of(node: fx.Node) -> str:
    """The innermost line of the model's own code, else of any library: path:number."""
    frames = frames_of(node)
    own = [frame for frame in frames if not is_library(frame[0])] or frames
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def modules_of(node: fx.Node) -> tuple[str, ...]:
    """Paths of the modules that a node runs in, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple(f"{p}.".removeprefix("model.").rstrip(".") for p, _ in stack.values())
