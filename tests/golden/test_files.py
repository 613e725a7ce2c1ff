"""Files that were written once say the same for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from merak.core.files.private_files import write_own_file
from merak.graph.cache.value_file import ValueFile, write_values
from merak.graph.ir.serialize import pack_model, unpack_model
from tests.golden.files import KINDS, STORED, TRACE, built, known, loss_of


def same(found: Any, expected: Any) -> None:
    """Compare but for the rounding of figures; JSON has no tuples."""
    if isinstance(expected, dict):
        assert found.keys() >= expected.keys()
        for name, own in expected.items():
            same(found[name], own)
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
    else:
        is_figure = isinstance(expected, float)
        assert found == (pytest.approx(expected, rel=1e-6) if is_figure else expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_says_what_it_said(kind: str) -> None:
    same(KINDS[kind].read(STORED), known()[kind])


def test_a_trace_is_not_taken_for_one_of_this_code(tmp_path: Path) -> None:
    """Its name has the versions and all of Merak's code in it, so no other version reads it."""
    old = (STORED / TRACE).read_bytes()
    (entry := tmp_path / f"{'0' * 40}.graph").write_bytes(old)
    own = built(tmp_path)
    assert not own.cached and entry.read_bytes() == old
    assert loss_of(own.graph) == pytest.approx(known()["trace"], rel=1e-6)
    assert built(tmp_path).cached


def test_a_trace_under_the_name_of_a_new_one_computes_the_same_or_is_made_anew(
    tmp_path: Path,
) -> None:
    built(tmp_path)
    (entry,) = tmp_path.glob("*.graph")
    write_own_file(entry, (STORED / TRACE).read_bytes())
    assert loss_of(built(tmp_path).graph) == pytest.approx(known()["trace"], rel=1e-6)
    foreign = {"sources": {"/no/such/model.py": "0" * 32}}
    graph = unpack_model(ValueFile(entry.read_bytes())["graph"])
    write_own_file(entry, write_values(foreign | {"graph": pack_model(graph)}))
    again = built(tmp_path)
    assert not again.cached
    assert loss_of(again.graph) == pytest.approx(known()["trace"], rel=1e-6)
