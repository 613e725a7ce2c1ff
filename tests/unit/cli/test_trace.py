"""`merak trace`: what every operator computes and saves, and where autograd runs a backward."""

from __future__ import annotations

import json
from typing import Any

import pytest

from merak.cli.main import main
from merak.plan.cost.segments import by_graph

TINY = '{"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11, "n_positions": 16}'
WORDS = ["trace", "--model", "GPT2LMHeadModel", "--config", TINY, "--batch", "1", "--operators"]


def test_operators_have_their_flops_and_saved_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--tp", "1", "--json"]) == 0
    found = {own["name"]: own for own in json.loads(capsys.readouterr().out)["operators"]}
    block = found["transformer.h.0.attn"]
    assert block["count"] == 2 and block["input_bytes"] == 4 * 16 * 8
    parts = {part: 0.0 for part in ("forward", "backward", "weight gradient")}
    for row in block["operators"]:
        parts[row["part"]] += row["flops"] if row["operator"] in ("addmm", "mm") else 0.0
    products = 2 * 16 * 8 * (3 * 8 + 8)
    assert parts == dict.fromkeys(parts, products)
    (attention,) = [r for r in block["operators"] if r["operator"].startswith("scaled_dot")]
    assert attention["saved_bytes"] > 0
    saved = [row for row in block["operators"] if row["saved_bytes"]]
    assert {row["part"] for row in saved} == {"forward"}
    # Two pairs of heads' keys, queries and values, and what the projection reads.
    assert sum(row["saved_bytes"] for row in saved) >= 4 * 16 * (3 * 8 + 8)


def test_ranks_of_tensor_parallelism_have_their_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--tp", "2", "--device", "h100"]) == 0
    page = capsys.readouterr().out
    assert "transformer.h.0.attn and 1 segment like it: FLOPs forward" in page
    rows = [line.split() for line in page.splitlines()]
    assert ["forward", "reduce_from", "1", "×", "16", "×", "8"] in rows
    assert ["backward", "all_reduce", "16", "×", "8"] in rows


@pytest.mark.parametrize("device", [(), ("--device", "h100")])
def test_a_backward_of_which_no_graph_can_be_made_is_named(
    device: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The segment's operators tell nothing: its backward has to be recorded for it."""
    derive = by_graph.derive

    def derived(graph: Any, like: Any, given: Any) -> Any:
        if any("tanh" in node.name for node in graph.nodes):
            raise ValueError("its tanh cannot be recorded")
        return derive(graph, like, given)

    monkeypatch.setattr(by_graph, "derive", derived)
    other = TINY.replace('"n_embd": 8', '"n_embd": 20')  # of which no other test knows segments
    words = ["trace", "--model", "GPT2LMHeadModel", "--config", other, "--batch", "1"]
    assert main([*words, *device, "--tp", "1", "--json"]) == 0
    parts = json.loads(capsys.readouterr().out)["parts"]
    found = {part["name"]: part["autograd"] for part in parts if part["autograd"]}
    assert found["transformer.h.0.mlp"] == "its tanh cannot be recorded"
    assert all("attn" not in name for name in found)
