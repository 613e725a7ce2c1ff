"""Reads lists of words from standard input, starts each script with them until it has parsed.

Prints the lists that a script refuses, each with what it said. One process imports torch once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import runpy
import sys
from pathlib import Path
from typing import Any

_parse = argparse.ArgumentParser.parse_args


class Parsed(Exception):
    """The script has parsed its arguments."""


def parse_and_stop(self: argparse.ArgumentParser, *given: Any, **named: Any) -> None:
    """In place of `parse_args`."""
    _parse(self, *given, **named)
    raise Parsed


def said(words: list[str]) -> str | None:
    """What a script says to its arguments; None if it takes them."""
    errors = io.StringIO()
    path = list(sys.path)
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            if words[0] == "-m":
                sys.argv = words[1:]
                runpy.run_module(words[1], run_name="__main__", alter_sys=True)
            else:
                sys.argv = words
                sys.path.insert(0, str(Path(words[0]).parent.resolve()))
                runpy.run_path(words[0], run_name="__main__")
    except Parsed:
        return None
    except SystemExit as left:
        return errors.getvalue() or f"it ended with {left.code}"
    finally:
        sys.path[:] = path
    return "it has run to its end without parsing any argument"


def main() -> None:
    argparse.ArgumentParser.parse_args = parse_and_stop  # type: ignore[method-assign,assignment]
    asked = json.load(sys.stdin)
    answers = [(words, said(words)) for words in asked]
    json.dump([answer for answer in answers if answer[1] is not None], sys.stdout)


if __name__ == "__main__":
    main()
