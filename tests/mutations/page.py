"""Write the page of mutations: `python -m tests.mutations.page docs/mutations.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tests.multirank.test_check_of_parts import PARTS
from tests.mutations.mutation import Mutation
from tests.mutations.table import MUTATIONS

HEAD = """# What the tests notice

Mistakes that distributed training is known for, made on purpose, each in one function of Merak
(`tests/mutations`). `make test-all` makes all of them, `make test` three, and each time runs the
test that the row names, which must fail; so does a mistake whose function has gone. In the last
column is the `merak check` that finds it in a user's own model, or what else would. `python -m
tests.mutations.page docs/mutations.md` writes this page.

| mistake | made in | noticed by | found by |
| --- | --- | --- | --- |
"""


def main() -> None:
    """Write the page to the file that the argument names."""
    Path(sys.argv[1]).write_text(render(MUTATIONS.values()), encoding="utf-8")


def render(mutations: Iterable[Mutation]) -> str:
    """The page.

    Args:
        mutations: its rows.
    """
    rows = []
    for mutation in mutations:
        made_in = mutation.target.rpartition(":")[2]
        noticed = "<br>".join(f"`{_name(test)}`" for test in mutation.tests)
        rows.append(f"| {mutation.mistake} | `{made_in}` | {noticed} | {_found_by(mutation)} |\n")
    return HEAD + "".join(rows)


def _name(test: str) -> str:
    file, _, name = test.partition("::")
    return f"{Path(file).name}::{name.partition('[')[0]}"


def _found_by(mutation: Mutation) -> str:
    if mutation.check is None:
        return mutation.else_found_by
    model, fields, layout = PARTS[mutation.check]
    given = f" --config '{json.dumps(fields)}'" if fields else ""
    degrees = {name: getattr(layout, name) for name in ("tp", "pp", "cp")}
    wanted = "".join(f" --{name} {degree}" for name, degree in degrees.items() if degree > 1)
    return f"`merak check --model {model}{given}{wanted}`"


if __name__ == "__main__":
    main()
