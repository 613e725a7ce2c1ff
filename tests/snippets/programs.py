"""Programs of the docs, run as they stand on the ranks of a pool."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from tests.snippets.blocks import Block, blocks
from tests.snippets.names import NAMES


def programs() -> tuple[Block, ...]:
    """Every block of Python, and every diff of a script, that is run."""
    return tuple(
        block
        for block in blocks()
        if block.language in ("python", "diff") and block.kind is None and block.reason is None
    )


def source_of(block: Block) -> str:
    """The program of a block; of a diff, the script after the change."""
    if block.language != "diff":
        return block.text
    lines = [line for line in block.text.splitlines() if not line.startswith(("-", "@"))]
    return "\n".join(line[1:] for line in lines)


def run(block: Block, folder: str) -> list[str]:
    """Run a program on this rank, and return the names that it has made.

    Args:
        block: of a page.
        folder: an empty one, for all ranks.
    """
    import transformers

    import merak

    on_cpu = functools.partial(merak.init, device="cpu")
    kept = dict(os.environ), Path.cwd()
    try:
        with (
            mock.patch.object(merak, "init", on_cpu),
            mock.patch.object(transformers, "GPT2Config", transformers.GPT2Config),
            contextlib.redirect_stdout(sys.stderr),
        ):
            os.chdir(folder)
            names: dict[str, Any] = {"__name__": "__main__"}
            for name in block.names:
                names |= NAMES[name]()
            before = set(names)
            lines = "\n" * block.line  # so that a traceback names the page's own lines
            exec(compile(lines + source_of(block), block.page, "exec"), names)
    finally:
        os.environ.clear()
        os.environ.update(kept[0])
        os.chdir(kept[1])
    return sorted(set(names) - before - {"__builtins__"})


def on_rank_0(work: Callable[[], None]) -> None:
    """Let rank 0 do something that the other ranks need the result of."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        work()
    dist.barrier()
