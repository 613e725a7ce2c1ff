"""Adapters of peft, trained on many ranks, are saved alone, as transformers' Trainer saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from merak.checkpoint.save_pretrained import save_pretrained
from tests.multirank.ranks import RankPool
from tests.multirank.test_frozen import low_rank_llama
from tests.multirank.training import llama

IDS = torch.arange(1, 25).view(2, 12)
BATCH = {"input_ids": IDS, "labels": IDS}


def save(folder: str) -> None:
    import merak

    mesh = merak.init(tp=2, pp=2, device="cpu")
    torch.manual_seed(3)
    parallel = merak.parallelize(
        low_rank_llama(), BATCH, optimizer=lambda p: torch.optim.SGD(p, lr=0.5)
    )
    parallel.step(BATCH)
    engine = parallel.engine
    for _ in range(2):  # the second time over the first
        save_pretrained(parallel.model, engine.held(), engine.shards, mesh, folder)


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    sets = ("target_modules", "feedforward_modules", "target_parameters", "modules_to_save")
    return config | {name: sorted(config[name]) for name in sets if config.get(name)}


def test_the_adapters_alone_are_saved(pool: RankPool, tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    folder, alone = tmp_path / "ranks", tmp_path / "alone"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"somebody's")
    pool.run(save, 4, str(folder))
    torch.manual_seed(3)
    expected: Any = low_rank_llama()
    loss = expected(**BATCH).loss
    loss.backward()
    torch.optim.SGD((p for p in expected.parameters() if p.requires_grad), lr=0.5).step()
    expected.save_pretrained(alone)
    written = {path.name for path in folder.iterdir()} - {"model.safetensors"}
    assert written == {path.name for path in alone.iterdir()}
    assert (folder / "model.safetensors").read_bytes() == b"somebody's"
    found, wanted = (load_file(place / "adapter_model.safetensors") for place in (folder, alone))
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert config_of(folder) == config_of(alone)
    again = peft.PeftModel.from_pretrained(llama(), folder)
    assert any("lora_A" in name for name in again.state_dict())
