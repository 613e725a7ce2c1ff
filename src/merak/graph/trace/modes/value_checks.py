"""Value checks in a model's code, such as of label ranges: a trace assumes that they pass.

`if labels.max() >= self.vocab_size: raise …` decides only whether the model fails. A trace has no
values, so it assumes that the check passes. A check of a data-dependent size, as in
`assert (ids == separator).nonzero().shape[0] == 3 * len(ids)`, becomes a constraint of the trace.
"""

from __future__ import annotations

import ast
import linecache
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any, Self
from unittest import mock

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)

from merak.core.rank0 import warn_on_rank0
from merak.core.source_lines import is_library

logger = logging.getLogger(__name__)

Place = tuple[str, int]
"""A file and the number of a line in it."""

_CHECKING = ("/torch/distributions/", "/torch/nn/functional.py", "/transformers/utils/")
"""Library code that checks the values of its arguments, as a model's own code does."""
_SPEAKERS = ("logger", "logging", "warnings")


class ValueChecks:
    """Context in which conditions that only guard an error are assumed to pass.

    Patches, not a function mode: a function of torch that a mode has already seen runs without that
    mode, and may check values itself.
    """

    def __init__(self) -> None:
        self._left_out: set[Place] = set()
        self._of_sizes: set[Place] = set()
        self._trees: dict[str, ast.Module] = {}
        self._patches = ExitStack()

    def __enter__(self) -> Self:
        """Patch the conversion of tensors and symbols to booleans."""

        def to_bool(tensor: FakeTensor) -> bool:
            return self._to_bool(tensor, sys._getframe(1))

        of_sizes: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

        def sizes_to_bool(condition: torch.SymBool) -> bool:
            self._assume(condition, sys._getframe(1))
            return of_sizes(condition)

        patch = mock.patch.object
        # Tensor's own method asks the modes first: values that they know need no answer.
        self._patches.enter_context(patch(FakeTensor, "__bool__", to_bool, create=True))
        self._patches.enter_context(patch(torch.SymBool, "__bool__", sizes_to_bool))
        return self

    def __exit__(self, *raised: object) -> None:
        """Undo the patches."""
        self._patches.close()

    def warn_skipped(self, are_sizes_checked: bool) -> None:
        """Warn, on rank 0, of checks that training leaves out.

        Args:
            are_sizes_checked: whether the graph makes checks of sizes when it runs.
        """
        left_out = self._left_out if are_sizes_checked else self._left_out | self._of_sizes
        for file, line in sorted(left_out):
            warn_on_rank0(
                logger,
                "%s:%d checks values of the batch (`%s`); the trace assumes that this check "
                "passes, and training leaves it out.",
                file,
                line,
                linecache.getline(file, line).strip(),
            )

    def _to_bool(self, tensor: torch.Tensor, frame: FrameType) -> bool:
        try:
            return torch.Tensor.__bool__(tensor)
        except (DataDependentOutputException, GuardOnDataDependentSymNode):
            place = _own_line(frame)
            answer = self._answer(place)
            if answer is None:
                raise
        self._left_out.add(place)
        return answer

    def _assume(self, condition: torch.SymBool, frame: FrameType) -> None:
        """Assume a check of sizes; the graph makes it if it can."""
        if not free_unbacked_symbols(condition):
            return
        place = _own_line(frame)
        answer = self._answer(place)
        if answer is not None:
            torch._check(condition if answer else torch.sym_not(condition))
            self._of_sizes.add(place)

    def _answer(self, place: Place) -> bool | None:
        return passing_value(self._tree(place[0]), place[1])

    def _tree(self, file: str) -> ast.Module:
        if file not in self._trees:
            try:
                self._trees[file] = ast.parse("".join(linecache.getlines(file)))
            except SyntaxError:
                self._trees[file] = ast.Module([], [])
        return self._trees[file]


def _own_line(frame: FrameType | None) -> Place:
    """The line of the model's code, or of a library's that checks values, that a frame runs for."""
    while frame is not None and _is_inner(frame.f_code.co_filename):
        frame = frame.f_back
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def _is_inner(file: str) -> bool:
    return is_library(file) and not any(part in file for part in _CHECKING)


def passing_value(tree: ast.AST, line: int) -> bool | None:
    """Value of a condition on a source line with which the code goes on.

    Args:
        tree: the file's code.
        line: the line that converts a tensor to a boolean.

    Returns:
        True or False; None where the line is no such test, or has contrary operands.
    """
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.Assert)) and _spans(node.test, line):
            wanted = _wanted(node)
            answers = set() if wanted is None else set(_leaves(node.test, wanted))
            return answers.pop() if len(answers) == 1 else None
    return None


def _spans(test: ast.expr, line: int) -> bool:
    return test.lineno <= line <= (test.end_lineno or test.lineno)


def _wanted(node: ast.If | ast.Assert) -> bool | None:
    """The boolean with which a test raises no error; None if it decides something else."""
    if isinstance(node, ast.Assert):
        return True
    if _only_complains(node.body):
        return False
    return True if node.orelse and _only_complains(node.orelse) else None


def _only_complains(body: list[ast.stmt]) -> bool:
    """Whether statements raise an error, or only warn."""
    return isinstance(body[-1], ast.Raise) or all(_warns(statement) for statement in body)


def _warns(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    called: Any = statement.value.func
    return isinstance(called, ast.Attribute) and getattr(called.value, "id", "") in _SPEAKERS


def _leaves(test: ast.expr, wanted: bool) -> Iterator[bool]:
    """The boolean that each operand of a test should have, if it can be a tensor."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _leaves(part, wanted)
    elif not (isinstance(test, ast.Compare) and isinstance(test.ops[0], (ast.Is, ast.IsNot))):
        yield wanted
