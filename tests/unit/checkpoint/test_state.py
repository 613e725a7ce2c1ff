"""Checkpoints to resume from, in one process: exactness, every optimizer, every error."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW, Optimizer

from merak.checkpoint import saver as parts
from merak.checkpoint.optimizer_state import refuse_other_class
from merak.checkpoint.saved import open_checkpoint
from merak.checkpoint.saver import save_state
from merak.checkpoint.shards import TensorShard, shard_of
from merak.checkpoint.state import RankState, load_state
from merak.core.errors import WeightsError
from merak.core.mesh import Mesh
from merak.core.shards import ParameterShard

CPU = torch.device("cpu")
ALONE = Mesh(1, 1, 1, 0, CPU, None)


class Small(nn.Module):
    """Tied weights, a scalar, a buffer that changes and one that is not saved."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(width, 10)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)) * self.scale)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def train(model: nn.Module, optimizer: Optimizer, num_steps: int) -> None:
    for step in range(num_steps):
        tokens = (torch.arange(8) * (step + 3)) % 10
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 10)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def owned(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


OPTIMIZERS: dict[str, Callable[[list[dict[str, Any]]], Optimizer]] = {
    "adamw": lambda groups: AdamW(groups, lr=0.01, amsgrad=True),
    "sgd": lambda groups: SGD(groups, lr=0.01, momentum=0.9),
    "plain-sgd": lambda groups: SGD(groups, lr=0.01),
    "adagrad": lambda groups: Adagrad(groups, lr=0.01),
    "adafactor": lambda groups: Adafactor(groups, lr=0.01),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_training_goes_on_bit_by_bit(
    make: Callable[[list[dict[str, Any]]], Optimizer], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Small()
    optimizer = make(groups_of(model))
    train(model, optimizer, 3)
    for group in optimizer.param_groups:
        group["lr"] = 0.005
    save_state(tmp_path / "state", RankState(model, optimizer, owned(model), {}, ALONE))
    train(model, optimizer, 3)
    torch.manual_seed(1)
    resumed = Small()
    other = make(groups_of(resumed))
    load_state(tmp_path / "state", RankState(resumed, other, owned(resumed), {}, ALONE))
    assert [group["lr"] for group in other.param_groups] == [0.005, 0.005]
    assert [group["weight_decay"] for group in other.param_groups] == [0.1, 0.0]
    train(resumed, other, 3)
    for (name, one), two in zip(model.state_dict().items(), resumed.state_dict().values()):
        assert torch.equal(one, two), name
    for one, two in zip(optimizer.state.values(), other.state.values(), strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(torch.as_tensor(one[k]), torch.as_tensor(two[k])) for k in one)


def test_state_in_another_dtype_than_the_parameter_is_kept(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False).to(torch.bfloat16)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["master"] = torch.rand(2, 3)
    save_state(tmp_path / "state", RankState(model, optimizer, ["weight"], {}, ALONE))
    other = SGD(model.parameters(), lr=0.2)
    load_state(tmp_path / "state", RankState(model, other, ["weight"], {}, ALONE))
    assert torch.equal(other.state[model.weight]["master"], optimizer.state[model.weight]["master"])


def test_objects_in_the_state_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(3, 2, bias=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight] = {"steps": 7, "history": [1.0, None]}
    save_state(tmp_path / "state", RankState(model, optimizer, ["weight"], {}, ALONE))
    other = SGD(model.parameters(), lr=0.1)
    load_state(tmp_path / "state", RankState(model, other, ["weight"], {}, ALONE))
    assert other.state[model.weight] == {"steps": 7, "history": [1.0, None]}


def test_groups_may_be_laid_out_anew(tmp_path: Path) -> None:
    """A stage that holds no biases has one group fewer; hyperparameters go by name."""
    model = Small()
    save_state(
        tmp_path / "state", RankState(model, AdamW(groups_of(model)), owned(model), {}, ALONE)
    )
    only_biases = AdamW([{"params": [model.head.bias], "weight_decay": 0.7}])
    load_state(tmp_path / "state", RankState(model, only_biases, owned(model), {}, ALONE))
    assert only_biases.param_groups[0]["weight_decay"] == 0.0


def test_the_model_alone(tmp_path: Path) -> None:
    model, other = Small(), Small()
    save_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
    load_state(tmp_path / "state", RankState(other, None, owned(other), {}, ALONE))
    assert torch.equal(model.head.weight, other.embedding.weight)
    with pytest.raises(WeightsError, match="was saved without an optimizer"):
        load_state(tmp_path / "state", RankState(other, AdamW(other.parameters()), [], {}, ALONE))


def test_an_older_checkpoint_is_replaced_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    save_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
    first = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    with monkeypatch.context() as patch:
        patch.setattr(parts, "_save_alone", lambda *args: 1 / 0)
        with pytest.raises(WeightsError, match=r"could not be written: ZeroDivisionError"):
            save_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
    load_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
    assert torch.equal(model.weight, first)
    nn.init.ones_(model.weight)
    save_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
    nn.init.zeros_(model.weight)
    load_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
    assert bool((model.weight == 1).all())
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


@pytest.mark.parametrize("unfinished", [True, False])
def test_a_folder_without_a_complete_checkpoint_is_refused(
    tmp_path: Path, unfinished: bool
) -> None:
    model = nn.Linear(2, 2)
    if unfinished:
        save_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
        (tmp_path / "state" / "manifest.json").unlink()
    with pytest.raises(WeightsError, match=r"state holds no valid checkpoint"):
        load_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))


def test_a_folder_with_other_files_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep")
    model = nn.Linear(2, 2)
    with pytest.raises(WeightsError, match="save to a folder of its own"):
        save_state(tmp_path, RankState(model, None, owned(model), {}, ALONE))
    assert (tmp_path / "notes.txt").read_text() == "keep"


def test_another_model_is_refused_by_name(tmp_path: Path) -> None:
    model, other = Small(), Small(width=4)
    save_state(tmp_path / "state", RankState(model, None, owned(model), {}, ALONE))
    message = r"another model: embedding.embedding_dim is 6 in the checkpoint and 4 in the model"
    with pytest.raises(WeightsError, match=message):
        load_state(tmp_path / "state", RankState(other, None, ["embedding.weight"], {}, ALONE))
    with pytest.raises(WeightsError, match="class is 'Small' in the checkpoint and 'Linear' in"):
        load_state(tmp_path / "state", RankState(nn.Linear(2, 2), None, ["weight"], {}, ALONE))


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    model, stranger = Small(), nn.Linear(3, 2)
    with pytest.raises(WeightsError, match=r"shape \(2, 3\) that the model does not have"):
        save_state(
            tmp_path / "s", RankState(model, SGD(stranger.parameters()), owned(model), {}, ALONE)
        )
    frozen = SGD([model.scale], lr=0.1)
    save_state(tmp_path / "s", RankState(model, frozen, owned(model), {}, ALONE))
    with pytest.raises(
        WeightsError, match=r"trains head\.bias, but the one that was saved did not"
    ):
        load_state(
            tmp_path / "s", RankState(model, SGD([model.head.bias]), owned(model), {}, ALONE)
        )


def test_groups_that_were_separate_are_not_merged_silently(tmp_path: Path) -> None:
    model = Small()
    save_state(tmp_path / "s", RankState(model, AdamW(groups_of(model)), owned(model), {}, ALONE))
    with pytest.raises(WeightsError, match="resume with the same groups"):
        load_state(
            tmp_path / "s", RankState(model, AdamW(model.parameters()), owned(model), {}, ALONE)
        )


def test_a_fused_part_is_several_boxes_of_the_whole() -> None:
    whole = torch.arange(36.0).view(3, 12)
    shard = ParameterShard(dim=1, parts=(8, 4), degree=2)
    local = torch.cat([whole[:, 4:8], whole[:, 10:12]], dim=1)
    part = shard_of(local, shard, 1)
    assert part.size == (3, 12)
    for offsets, piece in part.boxes:
        row, column = offsets
        width = piece.shape[1]
        assert torch.equal(whole[row:, column : column + width], piece)
    assert [offsets for offsets, _ in part.boxes] == [(0, 4), (0, 10)]
    assert isinstance(part, TensorShard)


def _saved_by(make: Callable[[list[dict[str, Any]]], Optimizer], folder: Path) -> Small:
    model = Small()
    optimizer = make(groups_of(model))
    train(model, optimizer, 1)
    save_state(folder, RankState(model, optimizer, owned(model), {}, ALONE))
    return model


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ("adamw", "sgd", r"the states of AdamW \(exp_avg, .*step\), from which SGD cannot go on"),
        ("sgd", "adamw", r"the states of SGD \(momentum_buffer\), from which AdamW cannot go on"),
    ],
)
def test_states_of_another_optimizer_are_not_dropped(
    saved: str, loaded: str, message: str, tmp_path: Path
) -> None:
    model = _saved_by(OPTIMIZERS[saved], tmp_path / "state")
    other = OPTIMIZERS[loaded](groups_of(model))
    with pytest.raises(WeightsError, match=message):
        load_state(tmp_path / "state", RankState(model, other, owned(model), {}, ALONE))


def test_an_optimizer_with_the_same_options_goes_on(tmp_path: Path) -> None:
    model = _saved_by(OPTIMIZERS["adamw"], tmp_path / "state")
    other = torch.optim.Adam(groups_of(model), lr=0.01, amsgrad=True)
    load_state(tmp_path / "state", RankState(model, other, owned(model), {}, ALONE))
    assert all("exp_avg" in other.state[p] for group in other.param_groups for p in group["params"])


def test_without_states_any_optimizer_begins(tmp_path: Path) -> None:
    model = _saved_by(OPTIMIZERS["plain-sgd"], tmp_path / "state")
    other = OPTIMIZERS["adamw"](groups_of(model))
    load_state(tmp_path / "state", RankState(model, other, owned(model), {}, ALONE))


def test_a_checkpoint_that_names_no_class_is_told_by_its_options(tmp_path: Path) -> None:
    model = _saved_by(OPTIMIZERS["adamw"], tmp_path / "state")
    saved = open_checkpoint(tmp_path / "state", False)
    values = {key: value for key, value in saved.values.items() if key != "optimizer_class"}
    assert saved.values.keys() - values.keys() == {"optimizer_class"}
    other = OPTIMIZERS["sgd"](groups_of(model))
    with pytest.raises(WeightsError, match=r"an optimizer with .*betas.* from which SGD cannot"):
        refuse_other_class(other, values, saved.metadata, saved.folder)
    again = OPTIMIZERS["adamw"](groups_of(model))
    refuse_other_class(again, values, saved.metadata, saved.folder)
