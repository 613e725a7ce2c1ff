"""Whole tensors of a checkpoint: as they were, whatever becomes of its files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from merak.checkpoint import saver, state
from merak.checkpoint.pretrained import whole_tensors
from merak.checkpoint.pretrained.whole_tensors import WholeTensors
from merak.core.mesh import Mesh


def checkpoint(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    mesh = Mesh(1, 1, 1, 0, torch.device("cpu"), None)
    saver.save_state(folder, state.RankState(model, None, ("weight", "bias"), {}, mesh))
    return model


def over(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file({"weight": torch.zeros(1)}, file)


def same(tensors: dict[str, torch.Tensor], file: Path) -> None:
    save_file(tensors, file)


def by_torch(tensors: dict[str, torch.Tensor], file: Path) -> None:
    torch.save(tensors, file)


def cut_off(tensors: dict[str, torch.Tensor], file: Path) -> None:
    file.write_bytes(b"")


@pytest.mark.parametrize("write", [over, same, by_torch, cut_off])
def test_files_may_be_written_over_by_hand(tmp_path: Path, write: Any) -> None:
    model = checkpoint(tmp_path / "weights")
    read = WholeTensors(tmp_path / "weights", "model/")
    found = read()
    for file in sorted((tmp_path / "weights").glob("*.safetensors")):
        write(found, file)
    for tensors in (found, read()):
        assert tensors.keys() == {"weight", "bias"}
        assert all(torch.equal(tensors[n], p) for n, p in model.named_parameters())
    found["bias"].add_(1.0)  # which is the reader's own


def test_a_large_model_is_mapped_and_outlives_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_tensors, "_SHARE", 0.0)
    model = checkpoint(tmp_path / "weights")
    found = WholeTensors(tmp_path / "weights", "model/")()
    shutil.rmtree(tmp_path / "weights")
    assert all(torch.equal(found[n], p) for n, p in model.named_parameters())
