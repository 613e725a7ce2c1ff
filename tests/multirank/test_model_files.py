"""Ranks that share the files of a folder: byte by byte the folder of transformers, or none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from merak.checkpoint.pretrained.tensor_file import TensorFile
from merak.checkpoint.save_pretrained import save_pretrained
from merak.core.errors import SavingError
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard, take
from merak.core.start.init import init
from tests.multirank.ranks import RankPool
from tests.multirank.test_frozen import low_rank_llama

SIZE = "9KB"


def gpt2() -> nn.Module:
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = GPT2Config(n_layer=3, n_embd=16, n_head=4, n_positions=32, vocab_size=61, **special)
    return GPT2LMHeadModel(config)


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads))


class Plain(nn.Module):
    """A tie, a buffer, and a parameter in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.norm = nn.BatchNorm1d(16)
        self.layers = nn.Sequential(*(nn.Linear(16, 64) for _ in range(4)))
        self.low = nn.Parameter(torch.randn(16, 4).bfloat16())
        self.head = nn.Linear(16, 61, bias=False)
        self.head.weight = self.embedding.weight


def adapters() -> nn.Module:
    torch.manual_seed(5)
    model: nn.Module = low_rank_llama()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": gpt2,
    "mixtral": mixtral,
    "plain": Plain,
    "adapters": adapters,
}


def shard_of(name: str, parameter: torch.Tensor, tp: int) -> ParameterShard | None:
    """Some parameters whole, others in shards of either dim; fused experts part by part."""
    sizes = parameter.shape
    if name.endswith("gate_up_proj"):
        return ParameterShard(1, (sizes[1] // 2,) * 2, tp)
    if parameter.dim() != 2 or sizes[0] == 16:
        return None
    return ParameterShard(0, (61,), tp) if sizes[0] == 61 else ParameterShard(1, (sizes[1],), tp)


def stage_of(name: str) -> int:
    """Odd layers and what comes after them are the second stage's."""
    return int(any(word in name for word in (".1.", ".2.", "ln_f", "norm", "lm_head", "low")))


def lay_out(model: nn.Module, mesh: Mesh) -> tuple[list[str], dict[str, ParameterShard]]:
    """Leave a rank of a whole model its stage and its shards."""
    held, shards = [], {}
    for name, parameter in model.named_parameters():
        if stage_of(name) % mesh.pp != mesh.pp_rank:
            parameter.data = torch.zeros(0)  # nobody may read it
            continue
        held.append(name)
        shard = shard_of(name, parameter, mesh.tp) if mesh.tp > 1 else None
        if shard is not None:
            shards[name] = shard
            parameter.data = take(parameter.data, shard, mesh.tp_rank)
    return held, shards


def save_all(layout: tuple[int, int, int], folder: str) -> None:
    mesh = init(*layout, device="cpu")
    for name, build in MODELS.items():
        torch.manual_seed(3)
        model = build()
        held, shards = lay_out(model, mesh)
        if mesh.dp_rank:
            for buffer in model.buffers():
                buffer.zero_()  # the first replica's count
        size = None if name == "mixtral" else SIZE
        save_pretrained(model, held, shards, mesh, Path(folder) / name, size)
        if name == "mixtral":  # in parts, transformers keeps experts of one tensor in one file
            save_pretrained(model, held, shards, mesh, Path(folder) / "parts", SIZE)


def expected_folder(name: str, folder: Path) -> None:
    torch.manual_seed(3)
    model: Any = MODELS[name]()
    if name != "plain":
        model.save_pretrained(folder, **({"max_shard_size": SIZE} if name == "gpt2" else {}))


def contents(folder: Path) -> dict[str, Any]:
    """Bytes of all files; of peft's config what it says, in which sets have no order."""
    found: dict[str, Any] = {path.name: path.read_bytes() for path in folder.iterdir()}
    if "adapter_config.json" in found:
        config = json.loads(found["adapter_config.json"])
        found["adapter_config.json"] = config | {"target_modules": sorted(config["target_modules"])}
    return found


@pytest.mark.parametrize("layout", [(2, 2, 1), pytest.param((1, 2, 2), marks=pytest.mark.slow)])
def test_the_folders_are_those_of_transformers(
    pool: RankPool, layout: tuple[int, int, int], tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    pool.run(save_all, 4, layout, str(tmp_path / "ranks"))
    for name in MODELS.keys() - {"plain"}:
        expected_folder(name, tmp_path / "expected" / name)
        ours, theirs = contents(tmp_path / "ranks" / name), contents(tmp_path / "expected" / name)
        assert ours.keys() == theirs.keys(), name
        assert [file for file in theirs if ours[file] != theirs[file]] == [], name
    assert len(list((tmp_path / "ranks" / "gpt2").glob("*.safetensors"))) > 4
    parts = [load_file(path) for path in (tmp_path / "ranks" / "parts").glob("*.safetensors")]
    whole = load_file(tmp_path / "expected" / "mixtral" / "model.safetensors")
    assert len(parts) > 4
    assert sum(map(len, parts)) == len(whole)
    assert all(torch.equal(whole[key], t) for part in parts for key, t in part.items())


def save_plain(folder: str) -> list[str]:
    mesh = init(2, 2, 1, device="cpu")
    torch.manual_seed(3)
    model = Plain()
    held, shards = lay_out(model, mesh)
    close, written = TensorFile.close, []

    def noted(file: TensorFile) -> None:
        written.append(Path(file._file.name).name)
        close(file)

    TensorFile.close = noted  # type: ignore[method-assign]
    try:
        save_pretrained(model, held, shards, mesh, folder, "5KB")
        save_pretrained(model, held, shards, mesh, f"{folder}-one")
    finally:
        TensorFile.close = close  # type: ignore[method-assign]
    return written


@pytest.mark.slow
def test_a_plain_module_gives_its_state_dict_from_all_ranks(pool: RankPool, tmp_path: Path) -> None:
    by_rank = pool.run(save_plain, 4, str(tmp_path / "out"))
    assert all(by_rank)  # every rank has written something
    torch.manual_seed(3)
    state = {key: tensor.clone() for key, tensor in Plain().state_dict().items()}
    save_file(state, tmp_path / "expected", metadata={"format": "pt"})
    assert [path.name for path in (tmp_path / "out-one").iterdir()] == ["model.safetensors"]
    ours = (tmp_path / "out-one" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "expected").read_bytes()
    files = {file for written in by_rank for file in written} - {"model.safetensors"}
    assert files == {path.name for path in (tmp_path / "out").glob("*.safetensors")}


def fail_on_one_rank(folder: str, rank: int) -> str:
    mesh = init(2, 2, 1, device="cpu")
    torch.manual_seed(3)
    model = gpt2()
    held, shards = lay_out(model, mesh)
    save_pretrained(model, held, shards, mesh, f"{folder}/old")
    close = TensorFile.close

    def full(file: TensorFile) -> None:
        raise OSError(28, "No space left on device")

    if dist.get_rank() == rank:
        TensorFile.close = full  # type: ignore[method-assign,assignment]
    messages = []
    try:
        for name in ("old", "new"):
            with pytest.raises(SavingError) as error:
                save_pretrained(model, held, shards, mesh, f"{folder}/{name}", "5KB")
            messages.append(str(error.value))
    finally:
        TensorFile.close = close  # type: ignore[method-assign]
    return "\n".join(messages)


def test_a_rank_that_cannot_write_ends_the_save_on_all(pool: RankPool, tmp_path: Path) -> None:
    messages = pool.run(fail_on_one_rank, 4, str(tmp_path), 3)
    assert len(set(messages)) == 1
    for name, sentence in zip(("old", "new"), messages[0].splitlines(), strict=True):
        assert sentence.startswith(f"The model could not be saved in {tmp_path / name}: No space")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    torch.manual_seed(3)
    gpt2().save_pretrained(tmp_path / "expected")  # type: ignore[operator]
    assert contents(tmp_path / "old") == contents(tmp_path / "expected")


def save_where_only_some_see(folder: str) -> list[str]:
    """Rank 0 and 2 share a disk; the other host has a folder of its own of that name."""
    mesh = init(2, 2, 1, device="cpu")
    torch.manual_seed(3)
    model = gpt2()
    held, shards = lay_out(model, mesh)
    place = Path(folder) / ("here" if mesh.rank in (0, 2) else "there") / "out"
    save_pretrained(model, held, shards, mesh, place, SIZE)
    return sorted(path.name for path in place.parent.iterdir()) if place.parent.exists() else []


@pytest.mark.slow
def test_ranks_that_do_not_see_the_folder_write_nothing(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    assert pool.run(save_where_only_some_see, 4, str(tmp_path)) == [["out"], [], ["out"], []]
    expected_folder("gpt2", tmp_path / "expected")
    assert contents(tmp_path / "here" / "out") == contents(tmp_path / "expected")
