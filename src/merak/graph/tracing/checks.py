"""Checks of a batch's numbers in a model's code: a trace takes them to pass.

`if labels.max() >= self.vocab_size: raise …` decides nothing but whether the model fails. Numbers
are not there while it is traced, so the way past the check is taken.
"""

from __future__ import annotations

import ast
import linecache
import logging
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

logger = logging.getLogger(__name__)

_LIBRARIES = ("/torch/", "/merak/graph/", "<")
_CHECKING = ("/torch/distributions/", "/torch/nn/functional.py")
"""Code of torch that checks the numbers of what it is given, as a model's own does."""
_SPEAKERS = ("logger", "logging", "warnings")


class PassedChecks(TorchFunctionMode):
    """While active, a tensor whose truth only decides whether an error is raised lets it pass."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[tuple[str, int], str] = {}
        self._trees: dict[str, ast.Module] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Answer for a tensor of unknown numbers; anything else goes its way."""
        if func in (torch.Tensor.__bool__, torch.Tensor.item) and _is_unknown(func, args[0]):
            answer = self._answer(sys._getframe(1))
            if answer is not None:
                return answer
        return func(*args, **(kwargs or {}))

    def tell(self) -> None:
        """Say which checks are left out, on one rank."""
        if dist.is_initialized() and dist.get_rank():
            return
        for (file, line), text in self._found.items():
            logger.warning(
                "%s:%d checks the numbers of the batch (`%s`); this check is taken to pass, and is "
                "not made in training.",
                file,
                line,
                text,
            )

    def _answer(self, frame: FrameType | None) -> bool | None:
        while frame is not None and _is_inner(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None
        file, line = frame.f_code.co_filename, frame.f_lineno
        answer = passing(self._tree(file), line)
        if answer is not None:
            self._found[file, line] = linecache.getline(file, line).strip()
        return answer

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse("".join(linecache.getlines(file)))
            except SyntaxError:
                self._trees[file] = ast.Module([], [])
        return self._trees[file]


def _is_inner(file: str) -> bool:
    return any(part in file for part in _LIBRARIES) and not any(part in file for part in _CHECKING)


def _is_unknown(func: Callable[..., Any], tensor: Any) -> bool:
    if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
        return False
    return func is torch.Tensor.__bool__ or tensor.dtype is torch.bool


def passing(tree: ast.AST, line: int) -> bool | None:
    """How a tensor in a test on a line must be for the test to let the code go on.

    Args:
        tree: the file's code.
        line: where the tensor's truth is asked for.

    Returns:
        True or False, or None where the line is no such test, or one with contrary parts.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.Assert)) and _spans(node.test, line):
            wanted = _wanted(node)
            truths = set() if wanted is None else set(_leaves(node.test, wanted))
            return truths.pop() if len(truths) == 1 else None
    return None


def _spans(test: ast.expr, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _wanted(node: ast.If | ast.Assert) -> bool | None:
    """What a test must be for no error to be raised; None if it decides something else."""
    if isinstance(node, ast.Assert):
        return True
    if _only_complains(node.body):
        return False
    return True if node.orelse and _only_complains(node.orelse) else None


def _only_complains(body: list[ast.stmt]) -> bool:
    """Whether statements raise an error, or do nothing but warn."""
    return isinstance(body[-1], ast.Raise) or all(_warns(statement) for statement in body)


def _warns(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called: Any = statement.value.func
    return isinstance(called, ast.Attribute) and getattr(called.value, "id", "") in _SPEAKERS


def _leaves(test: ast.expr, wanted: bool) -> Iterator[bool]:
    """What each part of a test should be; parts that can be no tensor are left out."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _leaves(part, wanted)
    elif not (isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot))):
        yield wanted
