"""Mutations: mistakes made on purpose in one named function of Merak, to see which test notices.

A test run whose environment names a mutation (`VARIABLE`) has it in its own process and in those
of its ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, wraps
from pathlib import Path
from typing import Any

VARIABLE = "MERAK_TEST_MUTATION"
"""Names the mutation that a process has."""

REACHED = "MERAK_TEST_MUTATION_REACHED"
"""Names the file that is made once the mutated function has been called."""


@dataclass(frozen=True)
class Mutation:
    """A mistake in one function.

    Args:
        name: of the mistake.
        mistake: what is wrong then, in words of the docs' table.
        target: "module:function" or "module:Class.method".
        make: makes the wrong function of the right one.
        tests: that must fail, by pytest's names; each takes seconds.
        check: which part of `test_check_of_parts.py` finds it, so that `merak check` does; None
            where the steps of `merak check` do not reach the mistake.
        else_found_by: what a user finds it by then.
    """

    name: str
    mistake: str
    target: str
    make: Callable[[Callable[..., Any]], Callable[..., Any]]
    tests: tuple[str, ...]
    check: str | None = None
    else_found_by: str = ""


class TargetGoneError(Exception):
    """A mutation's function is not where the mutation says: mend the mutation."""


def apply(mutation: Mutation) -> None:
    """Make the mistake in this process, for good.

    Raises:
        TargetGoneError: there is no such function.
    """
    module_name, _, path = mutation.target.partition(":")
    *owners, name = path.split(".")
    try:
        owner: Any = reduce(getattr, owners, importlib.import_module(module_name))
        right = vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise TargetGoneError(
            f"The mutation {mutation.name} changes {mutation.target}, which is gone ({error!r}); "
            "point it at the function that has this meaning now."
        ) from error
    wrong = _noted(mutation.make(right))
    setattr(owner, name, wrong)
    for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "merak"]:
        for known, value in list(vars(module).items()):
            if value is right:
                setattr(module, known, wrong)


def _noted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose first call makes the file of `REACHED`."""

    @wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if REACHED in os.environ:
            Path(os.environ[REACHED]).touch()
        return function(*args, **kwargs)

    return noted


_applied: set[str] = set()


def apply_named() -> None:
    """Make the mistake that the environment names, once in a process; none if it names none."""
    from tests.mutations.table import MUTATIONS

    name = os.environ.get(VARIABLE)
    if name is not None and name not in _applied:
        _applied.add(name)
        apply(MUTATIONS[name])
