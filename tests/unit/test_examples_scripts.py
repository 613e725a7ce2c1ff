"""The example scripts: the two that train GPT-2 differ only where Merak comes in."""

import difflib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 6


def changed_lines(before: list[str], after: list[str]) -> list[tuple[list[str], list[str]]]:
    blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [(before[a:b], after[c:d]) for kind, a, b, c, d in blocks if kind != "equal"]


def test_the_script_under_merak_differs_from_the_plain_one_in_a_few_lines():
    plain = (EXAMPLES / "pretrain_gpt2_hf.py").read_text().splitlines()
    merak = (EXAMPLES / "pretrain_gpt2.py").read_text().splitlines()
    changed = changed_lines(plain, merak)
    assert sum(max(len(old), len(new)) for old, new in changed) <= MAX_LINES
    for old, new in changed:
        assert any(word in " ".join(new) for word in ("merak", "degrees", "torchrun")), (old, new)
    assert not any("merak" in line for line in plain)
    assert "merak.init(*options.degrees)" in merak


@pytest.mark.parametrize("script", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_a_script_says_how_it_is_started(script):
    docstring = (EXAMPLES / script).read_text().split('"""')[1]
    assert f"examples/{script}" in docstring
