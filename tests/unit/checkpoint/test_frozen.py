"""Checkpoints that were written once must load for ever: of this format, and of the one before."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

from merak.checkpoint.saved import check_valid
from merak.checkpoint.state import RankState, load_state
from merak.core.errors import WeightsError
from merak.core.mesh import Mesh

STORED = Path(__file__).parents[2] / "golden" / "checkpoints"
ALONE = Mesh(1, 1, 1, 0, torch.device("cpu"), None)
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
CONFIG = GPT2Config(n_layer=1, n_embd=8, n_head=2, n_positions=8, vocab_size=13, **SPECIAL)


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]


def loaded(folder: Path, allow_pickled: bool) -> dict[str, str]:
    """Digests of all that one rank reads of a checkpoint that two ranks have written."""
    model = GPT2LMHeadModel(CONFIG)
    names = [name for name, _ in model.named_parameters()]
    is_decayed = {name: "bias" not in name and "ln_" not in name for name in names}
    groups = [
        {"params": [p for name, p in model.named_parameters() if is_decayed[name] == wanted]}
        for wanted in (True, False)
    ]
    optimizer = AdamW(groups)
    values = load_state(folder, RankState(model, optimizer, names, {}, ALONE), allow_pickled)
    assert values["scheduler"]["last_epoch"] == 2
    assert optimizer.param_groups[0]["lr"] == 0.0  # after a linear schedule of two steps
    found = {name: digest(parameter) for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        found |= {f"{name} {key}": digest(torch.as_tensor(state[key])) for key in sorted(state)}
    return found


def expected() -> dict[str, str]:
    found: dict[str, str] = json.loads((STORED / "expected.json").read_text())
    return found


def test_a_frozen_checkpoint_loads(tmp_path: Path) -> None:
    folder = STORED / "version-1"
    check_valid(folder)
    assert loaded(folder, allow_pickled=False) == expected()


def test_one_of_the_format_before_loads_if_that_is_allowed(tmp_path: Path) -> None:
    shutil.unpack_archive(STORED / "pickled.tar.xz", tmp_path, filter="data")
    folder = tmp_path / "checkpoint-2"
    with pytest.raises(WeightsError, match="set allow_pickled_checkpoint=True"):
        check_valid(folder)
    with pytest.raises(WeightsError, match="pickled index that can run code when it is read"):
        loaded(folder, allow_pickled=False)
    check_valid(folder, allow_pickled=True)
    assert loaded(folder, allow_pickled=True) == expected()
