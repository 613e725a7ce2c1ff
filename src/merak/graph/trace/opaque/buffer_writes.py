"""Buffers that an opaque module may write into, for some values of a batch."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache

from torch import nn


def may_write(module: nn.Module) -> frozenset[str]:
    """Names of a module's buffers that the code of its classes writes into, somewhere.

    A probe on synthetic values takes only one branch of the code.
    """
    found = set()
    for path, part in module.named_modules():
        own = {name for cls in type(part).__mro__ for name in _written_in(cls)}
        found |= {f"{path}.{name}".removeprefix(".") for name in part._buffers.keys() & own}
    return frozenset(found)


@cache
def _written_in(cls: type) -> frozenset[str]:
    """Attributes that a class's code assigns, or calls an in-place method of."""
    if cls.__module__.partition(".")[0] in ("torch", "builtins"):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # a class made without a file
        return frozenset()
    return frozenset(name for node in ast.walk(tree) for name in _targets(node))


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Assign):
        found: list[ast.expr] = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        found = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        # A method with an underscore at its end, and what is given as `out`.
        method = node.func.attr
        found = [node.func.value] if method.endswith("_") and not method.endswith("__") else []
        found += [keyword.value for keyword in node.keywords if keyword.arg == "out"]
    else:
        return
    while found:
        target = found.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            found += target.elts
        elif isinstance(target, (ast.Subscript, ast.Starred)):
            found.append(target.value)
        elif isinstance(target, ast.Attribute):
            yield target.attr
            found.append(target.value)  # self.count.data
        elif isinstance(target, ast.Call):
            found.append(target.func)  # self.count.view(-1)[0] = …
