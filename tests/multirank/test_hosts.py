"""Jobs on several hosts, of which each has a rank with LOCAL_RANK=0."""

from __future__ import annotations

import contextlib
import io
import logging
import os

import transformers

import merak
from tests.multirank.ranks import RankPool
from tests.multirank.training import Setup, make_merak


def train_on_a_host_of_its_own(folder: str) -> tuple[str, list[str], bool]:
    """What this rank prints and logs, and whether it takes itself for the one that does."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    heard: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    own = logging.getLogger("merak")
    root = logging.getLogger()
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.INFO)
    try:
        merak.init(pp=2, device="cpu")
        logging.getLogger("merak.any").info("said by all")
        trainer = make_merak(Setup("gpt2", 2, arguments={"max_steps": 1}), 1, folder)
        trainer.add_callback(transformers.PrinterCallback)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            trainer.train()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        own.setLevel(logging.NOTSET)
    return printed.getvalue(), heard, trainer.state.is_local_process_zero


def test_one_rank_of_all_hosts_logs(pool: RankPool, tmp_path: object) -> None:
    first, second = pool.run(train_on_a_host_of_its_own, 2, str(tmp_path))
    assert "loss" in first[0]
    assert "said by all" in first[1]
    assert first[2]
    assert second == ("", [line for line in second[1] if line != "said by all"], False)
    assert "said by all" not in second[1]
