"""Shards of parameters in a script's hands: what is let through, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from merak.core.errors import TrainingError
from merak.core.shards import ParameterShard
from merak.graph.weights.sharded import DimCut, ShardLayout, ShardTensor, ShardWatch, marked

ROWS, COLUMNS = ParameterShard(0, (8,), 2), ParameterShard(1, (12,), 2)


def parameter(shard: ParameterShard, shape: tuple[int, ...] = (4, 6)) -> nn.Parameter:
    made = nn.Parameter(torch.rand(shape))
    marked(
        made,
        ShardLayout("'w' is sharded over tp=2", ((shard.dim, DimCut(shard, sum(shard.parts))),)),
    )
    return made


P, Q, BIAS = parameter(ROWS), parameter(ROWS), parameter(ROWS, (4,))
C = parameter(COLUMNS)
PLAIN, LIKE = torch.ones(6), torch.ones(4, 6)

ALONE: list[Callable[[], object]] = [
    lambda: P.data.mul_(0.5).add_(Q.data, alpha=0.5),
    lambda: P.data.lerp_(Q.data, 0.5),
    lambda: P.data.copy_(Q),
    lambda: P.data.clamp_(-1, 1),
    lambda: P.data.mul_((P.abs() > 0.5).float()),
    lambda: torch.where(P > 0, P, Q),
    lambda: P.detach().clone().cpu().double(),
    lambda: copy.deepcopy(P),
    lambda: torch.zeros_like(P).add_(P),
    lambda: P.new_zeros(P.shape) + P,
    lambda: nn.init.constant_(P, 0.5),
    lambda: P * torch.tensor(2.0) + PLAIN,
    lambda: P.t() * Q.t(),
    lambda: P.flatten() * Q.view(-1),
    lambda: P * BIAS.unsqueeze(1),
    lambda: BIAS.unsqueeze(1).expand(4, 6) * P,
    lambda: torch.stack([P, Q]),
    lambda: torch.cat([P, Q], dim=1),
    lambda: P @ torch.ones(6, 3),
    lambda: P.norm(dim=1),
    lambda: P.view(P.size(0), -1).norm(dim=1),
    lambda: C.norm(dim=0),
    lambda: nn.functional.normalize(P),
    lambda: P.data.div_(P.data.norm(dim=1, keepdim=True)),
    lambda: P.unbind(1)[0],
    lambda: P[:, 0],
    lambda: torch._foreach_add([P.data, C.data], [Q.data, C.data])[1],
]


@pytest.mark.parametrize("compute", ALONE)
@torch.no_grad()
def test_what_gives_the_same_part_of_the_whole_is_a_shard_again(
    compute: Callable[[], object],
) -> None:
    assert isinstance(compute(), ShardTensor)


READS: list[tuple[str, Callable[[], object]]] = [
    ("reads", lambda: P.norm()),
    ("reads", lambda: P.detach().pow(2).sum()),
    ("reads", lambda: P.abs().max().item()),
    ("reads", lambda: float(BIAS.mean())),
    ("reads", lambda: P.norm(dim=0)),
    ("reads", lambda: C.std(dim=1)),
    ("reads", lambda: P.mean(0, keepdim=True)),
    ("reads", lambda: P.flatten().sum()),
    ("reads", lambda: P.view(2, -1).sum(1)),
    ("reads", lambda: torch._foreach_norm([P, C])),
    ("reads", lambda: nn.utils.parameters_to_vector([P, Q])),
    ("reads", lambda: P.quantile(0.5)),
    ("reads", lambda: P.softmax(0)),
    ("reads", lambda: P.cumsum(0)),
    ("reads", lambda: P.flip(0)),
    ("reads", lambda: torch.histc(P.detach())),
    ("reads", lambda: torch.linalg.svdvals(P)),
    ("reads", lambda: torch.linalg.matrix_norm(P)),
    ("reads", lambda: P.T @ P),
    ("reads", lambda: P @ P.T),
    ("reads", lambda: torch.ones(2, 4) @ P),
    ("reads", lambda: P + C),
    ("reads", lambda: parameter(ROWS, (4, 4)) + parameter(COLUMNS, (4, 4))),
    ("reads", lambda: P.flatten() + P.t().reshape(-1)),
    ("reads", lambda: P + LIKE),
    ("reads", lambda: P[0]),
    ("reads", lambda: P[:2]),
    ("reads", lambda: P[P > 0]),
    ("reads", lambda: P.chunk(2)),
    ("reads", lambda: list(P)),
    ("reads", lambda: P.diagonal()),
    ("reads", lambda: torch.equal(P, Q)),
    ("reads", lambda: torch.allclose(P, Q)),
    ("reads", lambda: P.tolist()),
    ("reads", lambda: P.detach().numpy()),
    ("reads", lambda: np.histogram(P.detach())),
    ("reads", lambda: torch.add(P, Q, out=torch.empty(4, 6))),
    ("writes into", lambda: P.data.copy_(torch.ones(8, 6))),
    ("writes into", lambda: P.data.add_(LIKE)),
    ("writes into", lambda: LIKE.add_(P)),
    ("writes into", lambda: LIKE.copy_(P)),
    ("writes into", lambda: setattr(P, "data", LIKE)),
    ("draws random numbers for", lambda: nn.init.xavier_uniform_(P)),
    ("draws random numbers for", lambda: nn.init.orthogonal_(P)),
    ("draws random numbers for", lambda: nn.init.trunc_normal_(P)),
    ("draws random numbers for", lambda: P.data.normal_(0, 0.02)),
    ("draws random numbers for", lambda: P + torch.randn_like(P)),
    ("draws random numbers for", lambda: nn.functional.dropout(P)),
    ("saves", lambda: torch.save(P, io.BytesIO())),
]


@pytest.mark.parametrize(("verb", "read"), READS)
@torch.no_grad()
def test_what_needs_the_whole_is_refused_with_the_line(
    verb: str, read: Callable[[], object]
) -> None:
    with pytest.raises(TrainingError) as refusal:
        read()
    said = str(refusal.value)
    assert said.startswith(f"this script {verb} a value of which this rank has a shard, at ")
    assert "test_sharded.py:" in said
    assert "'w' is sharded over tp=2" in said
    assert "merak.gathered_parameters(model, names)" in said
    assert torch.equal(LIKE, torch.ones(4, 6))


METADATA: list[Callable[[], object]] = [
    lambda: (P.shape, P.numel(), P.dtype, P.device, P.requires_grad, P.is_leaf, hash(P)),
    lambda: repr(P),
    lambda: P.requires_grad_(True),
    lambda: torch.zeros(P.shape).sum().item(),
    lambda: setattr(P, "data", Q.data.clone()),
    lambda: setattr(P, "grad", None),
]


@pytest.mark.parametrize("read", METADATA)
def test_metadata_are_read(read: Callable[[], object]) -> None:
    shape = P.shape
    read()
    assert P.shape == shape and type(P) is type(parameter(ROWS))  # and it is followed as before


def test_a_script_counts_the_elements_of_the_whole() -> None:
    values = [P, C, P.data, torch.zeros_like(P), P.view(-1), P.t().reshape(2, 12)]
    assert [value.numel() for value in values] == [48, 48, 48, 48, 48, 48]
    assert BIAS.numel() == BIAS.nelement() == 8 and P[:, 0].numel() == 8 and len(P) == 4
    assert P.shape == (4, 6) and P.view(P.shape).numel() == 48


def test_data_that_a_script_replaces_stay_where_an_optimizer_steps_their_rows() -> None:
    tensor = nn.Parameter(torch.ones(4, 6))
    rows = tensor.detach()[:2]
    marked(tensor, ShardLayout("'w' has another optimizer tensor", (), is_stepped=False))
    nn.utils.vector_to_parameters(torch.zeros(24), [tensor])
    assert not rows.any() and not tensor.any()
    rows.fill_(2.0)
    assert tensor.sum().item() == 24


def test_gradients_are_shards() -> None:
    tensor = parameter(ROWS)
    tensor.grad = torch.ones(4, 6)
    nn.utils.clip_grad_value_([tensor], 0.5)
    with torch.no_grad():
        tensor.add_(tensor.grad, alpha=-0.1)
    with pytest.raises(TrainingError, match=r"^this script reads the gradient of a value of which"):
        nn.utils.clip_grad_norm_([tensor], 1.0)
    with pytest.raises(TrainingError, match=r"^this script reads a value of which"):
        tensor.grad.norm()


def test_gradients_that_are_elsewhere_are_missed_where_they_are_read() -> None:
    tensor = nn.Parameter(torch.ones(2))
    marked(tensor, ShardLayout("'w' has another optimizer tensor", (), is_stepped=False))
    torch.optim.SGD([tensor]).zero_grad()
    assert tensor.sum().item() == 2
    with pytest.raises(TrainingError, match=r"^this script reads the gradient of a parameter that"):
        print(tensor.grad)
    with pytest.raises(TrainingError, match=r"sync_model_params"):
        nn.utils.clip_grad_norm_([tensor], 1.0)


def test_an_engine_computes_with_plain_parameters() -> None:
    watch, tensor = ShardWatch(), nn.Parameter(torch.ones(4, 6))
    watch.start([(tensor, ShardLayout("'w' is sharded", ((0, DimCut(ROWS, 8)),)))])
    with watch.paused(), watch.paused():
        assert type(tensor) is nn.Parameter
        assert tensor.sum().item() == 24
    with pytest.raises(TrainingError):
        tensor.sum()
    watch.close()
    assert type(tensor) is nn.Parameter
