"""The last weights of a training stay on disk, and any rank reads them without the others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from merak.core.errors import WeightsError
from tests.multirank.ranks import RankPool
from tests.multirank.test_frozen import low_rank_llama
from tests.multirank.training import (
    Layout,
    Setup,
    alone,
    make_merak,
    make_reference,
    model_of,
)
from tests.tiers import slow

STEPS: dict[str, Any] = {"max_steps": 2, "optim": "sgd"}
Tensors = dict[str, torch.Tensor]


class SavesAtTheEnd(transformers.TrainerCallback):
    """As a script's own, which saves on the main process when training has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            kwargs["model"].save_pretrained(self.folder / "callback")


ADAPTED = ("lora", "prompt", "prefix", "p-tuning")


def make_model(family: str) -> nn.Module:
    torch.manual_seed(5)
    if family not in ADAPTED:
        return model_of(Setup(family))
    if family == "lora":
        return low_rank_llama()
    peft = pytest.importorskip("peft")
    kinds = {
        "prompt": peft.PromptTuningConfig,
        "prefix": peft.PrefixTuningConfig,
        "p-tuning": partial(peft.PromptEncoderConfig, encoder_hidden_size=8),
    }
    config = kinds[family](task_type="CAUSAL_LM", num_virtual_tokens=3)
    adapted: nn.Module = peft.get_peft_model(model_of(Setup("gpt2")), config)
    return adapted


def setup_of(family: str, **arguments: Any) -> Setup:
    known = "llama" if family in ADAPTED else family
    return Setup(known, padded=False, arguments=STEPS | arguments)


def save_in_all_ways(trainer: Any, folder: Path) -> None:
    """What scripts do behind train(), each into a folder or file of its own."""
    model, accelerator = trainer.model, trainer.accelerator
    plain = not hasattr(model, "save_pretrained")
    torch.save(model.state_dict(), folder / "state.pt")
    torch.save(model, folder / "model.pt")
    torch.save(next(model.children()).state_dict(), folder / "child.pt")
    torch.save(next(model.children()), folder / "whole_child.pt")
    save_file({n: t.clone() for n, t in model.state_dict().items()}, folder / "state.safetensors")
    trainer.save_model(str(folder / "trainer"))
    accelerator.save_model(model, folder / "save_model")
    if plain:
        return
    trainer._save(str(folder / "_save"), state_dict=accelerator.get_state_dict(model))
    model.save_pretrained(folder / "model")
    accelerator.unwrap_model(model).save_pretrained(
        folder / "accelerate",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )


def train(layout: Layout, family: str, zero: int, cache: str, folder: Path) -> dict[str, Any]:
    import merak

    dp, tp, pp = layout
    merak.init(dp=dp, tp=tp, pp=pp, device="cpu")
    setup = setup_of(family, zero=zero)
    trainer = make_merak(setup, dp, cache, model=make_model(family))
    trainer.train()
    left = Path(trainer.args.output_dir) / "last-weights"
    rank, own = trainer.mesh.rank, None
    if rank == 0:
        save_in_all_ways(trainer, folder)
        own = trainer.gather_state_dict()
    state = trainer.model.state_dict()  # of any rank
    seen = {name: tensor.clone() for name, tensor in state.items()}
    trainer.engine.last_weights.forget("the ranks gather them")
    whole = trainer.gather_state_dict()  # which all ranks do together
    return {"whole": whole, "seen": seen, "left": left.is_dir(), "own": own}


def reference(family: str, folder: Path) -> Tensors:
    folder.mkdir()
    with alone():
        trainer = make_reference(setup_of(family), model=make_model(family))
        trainer.train()
        save_in_all_ways(trainer, folder)
    model: Any = trainer.model
    return dict(model.state_dict())


def contents(path: Path) -> Tensors:
    """Tensors of a file or folder, by name."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        return {key: value for file in files for key, value in load_file(file).items()}
    if path.suffix == ".safetensors":
        return load_file(path)
    found = torch.load(path, weights_only=False)
    return dict(found.state_dict() if isinstance(found, nn.Module) else found)


@pytest.mark.parametrize(
    "layout,family,zero",
    [
        ((1, 1, 2), "gpt2", 0),
        slow((1, 1, 2), "lora", 0),
        slow((1, 1, 2), "prompt", 0),
        slow((1, 2, 1), "gpt2", 0),
        slow((2, 1, 1), "gpt2", 3),
        slow((1, 1, 2), "plain", 0),
    ],
)
def test_rank_0_saves_what_one_process_saves(
    pool: RankPool, cache: str, tmp_path: Path, layout: Layout, family: str, zero: int
) -> None:
    if family in ADAPTED:
        pytest.importorskip("peft")
    folder = tmp_path / "ranks"
    folder.mkdir()
    world_size = layout[0] * layout[1] * layout[2]
    ranks = pool.run(train, world_size, layout, family, zero, cache, folder)
    expected = reference(family, tmp_path / "alone")
    whole = ranks[0]["whole"]
    assert ranks[0]["own"].keys() == whole.keys()
    for rank in ranks:
        assert list(rank["seen"]) == list(expected)
        assert all(torch.equal(rank["seen"][name], whole[name]) for name in whole)
    ways = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert ways == sorted(path.name for path in folder.iterdir())
    for way in ways:
        found, wanted = contents(folder / way), contents(tmp_path / "alone" / way)
        assert found.keys() == wanted.keys(), way
        for name, value in wanted.items():
            assert found[name].dtype == value.dtype
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
        shared = {name: value.untyped_storage().data_ptr() for name, value in found.items()}
        alike = {name: value.untyped_storage().data_ptr() for name, value in wanted.items()}
        assert len({*shared.values()}) == len({*alike.values()}), way  # tied weights


def train_again(cache: str, folder: Path) -> dict[str, Any]:
    import merak

    merak.init(pp=2, device="cpu")
    setup = setup_of("gpt2", output_dir=str(folder / "output"))
    trainer = make_merak(setup, 1, cache, callbacks=[SavesAtTheEnd(folder)])
    is_first = trainer.mesh.rank == 0
    with pytest.raises(WeightsError, match="no weights of this training are on disk") as early:
        trainer.create_optimizer()
        trainer.model.state_dict()
    trainer.train()
    output = Path(trainer.args.output_dir)
    left = output / "last-weights"
    if is_first:
        shutil.copytree(left, folder / "left")
        shutil.rmtree(left)  # as scripts do that clean up
    trainer.save_model(str(folder / "saved"))
    files = sorted(path.name for path in (folder / "saved").iterdir())  # on every rank
    first = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    trainer.args.max_steps = 4
    trainer.args.save_strategy = "steps"
    trainer.args.save_steps = 4
    trainer.train()
    second = {n: t.clone() for n, t in trainer.model.state_dict().items()}
    again = left.exists()
    trainer.remove_callback(SavesAtTheEnd)
    trainer.args.max_steps = 5
    trainer.args.save_strategy = "no"
    trainer.args.save_last_weights = False
    trainer.train()
    with pytest.raises(WeightsError, match="save_last_weights=False") as late:
        trainer.model.save_pretrained(folder / "late")
    trainer.save_model(str(folder / "together"))
    third = trainer.gather_state_dict()
    return {
        "early": str(early.value),
        "late": str(late.value),
        "files": files,
        "states": (first, second, third),
        "again": again,
    }


def test_stale_weights_are_never_read(pool: RankPool, cache: str, tmp_path: Path) -> None:
    ranks = pool.run(train_again, 2, cache, tmp_path)
    first, second, third = ranks[0]["states"]
    for rank in ranks:
        assert "model.safetensors" in rank["files"]
        assert not rank["again"]  # a checkpoint of that step is there
        for name, tensor in first.items():
            assert torch.equal(rank["states"][0][name], tensor)
            assert torch.equal(rank["states"][1][name], second[name])
    name = "transformer.h.0.attn.c_attn.weight"
    assert not torch.equal(first[name], second[name])
    assert not torch.equal(second[name], third[name])
    for place, state in (("left", first), ("saved", first), ("callback", second)):
        assert torch.equal(contents(tmp_path / place)[name], state[name])
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / place)
    assert torch.equal(contents(tmp_path / "together")[name], third[name])
    assert not (tmp_path / "late").exists()


def change(cache: str, folder: Path) -> list[str]:
    import merak

    merak.init(pp=2, device="cpu")
    trainer = make_merak(setup_of("gpt2"), 1, cache)
    trainer.train()
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda model: model.transformer.h[0].mlp.c_fc.weight.data.mul_(0.5),
        lambda model: setattr(model, "head", nn.Linear(2, 2)),
    )
    said = []
    left = trainer.engine.last_weights.folder
    with pytest.raises(WeightsError, match="is where the last weights of this training are read"):
        trainer.model.save_pretrained(left)
    with pytest.raises(WeightsError, match="save into another folder"):
        trainer.accelerator.save_model(trainer.model, f"{left}/.")
    with pytest.raises(WeightsError, match="saves the optimizer of one rank"):
        trainer.accelerator.save_state(f"{folder}-state-{trainer.mesh.rank}")
    if trainer.mesh.rank == 0:
        for one in changes:
            one(trainer.model)
            with pytest.raises(WeightsError) as caught:
                trainer.model.save_pretrained(folder)
            said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_a_model_that_is_changed_behind_its_training_is_refused(
    pool: RankPool, cache: str, tmp_path: Path
) -> None:
    values, names = pool.run(change, 2, cache, tmp_path / "saved")[0]
    assert "has other values of transformer.h.0.mlp.c_fc.weight" in values
    assert "changed since" in names and "load that folder with from_pretrained" in names
    assert not (tmp_path / "saved").exists()


def step(folder: Path) -> dict[str, Any]:
    import merak

    merak.init(pp=2, device="cpu")
    ids = torch.arange(24).view(2, 12)
    batch = {"input_ids": ids, "labels": ids}
    model = make_model("gpt2")
    parallel = merak.parallelize(model, batch, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    parallel.step(batch)
    with pytest.raises(WeightsError, match="trained since weights were last saved"):
        model.state_dict()
    parallel.save_checkpoint(folder)
    seen = {n: t.clone() for n, t in model.state_dict().items()}
    parallel.step(batch)
    with pytest.raises(WeightsError, match="trained since weights were last saved"):
        model.state_dict()
    parallel.load_checkpoint(folder)
    loaded = {n: t.clone() for n, t in model.state_dict().items()}
    return {"seen": seen, "loaded": loaded, "whole": parallel.gather_state_dict()}


def test_in_a_loop_of_ones_own_a_checkpoint_has_them(pool: RankPool, tmp_path: Path) -> None:
    ranks = pool.run(step, 2, tmp_path / "checkpoint")
    for name, tensor in ranks[0]["whole"].items():
        for rank in ranks:
            assert torch.equal(rank["seen"][name], tensor)
            assert torch.equal(rank["loaded"][name], tensor)
