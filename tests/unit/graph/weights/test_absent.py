"""Parameters that this rank does not have: what may be done with them, and what is refused."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

from merak.core.errors import TrainingError
from merak.graph.weights.absent import OF_REPLICAS, AbsentTensor, read_by, swap


def parameter(name: str = "head.weight") -> nn.Parameter:
    empty = torch.empty(3, 4, device="meta")
    return nn.Parameter(AbsentTensor(empty, f"{name!r} is a parameter of another pipeline stage"))


def with_gradient() -> nn.Parameter:
    made = nn.Parameter(torch.ones(3, 4))
    made.grad = torch.ones(3, 4)
    return made


HERE = nn.Parameter(torch.ones(3, 4))
AWAY, OTHER = parameter(), parameter("other.weight")

METADATA: list[Callable[[], object]] = [
    lambda: (AWAY.shape, AWAY.size(0), AWAY.dim(), AWAY.numel(), AWAY.stride(), len(AWAY)),
    lambda: (AWAY.dtype, AWAY.device, AWAY.is_meta, AWAY.is_leaf, AWAY.requires_grad, AWAY.grad),
    lambda: (AWAY.element_size(), AWAY.is_contiguous(), AWAY.is_floating_point(), hash(AWAY)),
    lambda: str(AWAY),
    lambda: f"{AWAY}",
    lambda: torch.zeros_like(AWAY, device="cpu").sum().item(),
    lambda: torch.zeros(AWAY.shape, dtype=AWAY.dtype),
    lambda: AWAY.view(-1).t(),
    lambda: torch.optim.AdamW([AWAY, HERE]).step(),
    lambda: nn.utils.clip_grad_value_([AWAY, with_gradient()], 1.0),
]


@pytest.mark.parametrize("read", METADATA)
def test_metadata_are_read(read: Callable[[], object]) -> None:
    read()


ALONE: list[Callable[[], torch.Tensor]] = [
    lambda: AWAY.data.mul_(0.5).add_(OTHER.data, alpha=0.5),
    lambda: AWAY.data.lerp_(OTHER.data, 0.5),
    lambda: AWAY.data.clamp_(-1, 1),
    lambda: AWAY.detach().copy_(OTHER),
    lambda: AWAY.detach().clone().cpu(),
    lambda: AWAY * torch.tensor(2.0) / AWAY.norm(),
    lambda: AWAY[torch.tensor([0, 2])],
    lambda: nn.init.zeros_(AWAY),
    lambda: torch._foreach_norm([HERE, AWAY])[1],
    lambda: copy.deepcopy(AWAY),
]


@pytest.mark.parametrize("compute", ALONE)
def test_what_another_rank_computes_part_by_part_stays_away(
    compute: Callable[[], torch.Tensor],
) -> None:
    assert isinstance(compute(), AbsentTensor)


def test_lists_of_parameters_are_computed_one_by_one() -> None:
    mine, its = HERE.detach().clone(), HERE.detach().clone()
    torch._foreach_mul_([AWAY.data, mine], 0.5)
    torch._foreach_add_([AWAY.data, mine], [OTHER.data, its])
    assert torch.equal(mine, torch.full((3, 4), 1.5))


READS: list[tuple[str, Callable[[], object]]] = [
    ("reads", lambda: HERE.data.add_(AWAY.data)),
    ("reads", lambda: HERE.data.copy_(AWAY)),
    ("reads", lambda: HERE.data * AWAY.data),
    ("reads", lambda: torch.zeros(()).add_(AWAY.norm())),
    ("reads", lambda: torch.stack([AWAY.norm(), HERE.norm()])),
    ("reads", lambda: AWAY.abs().max().item()),
    ("reads", lambda: float(AWAY.sum() + HERE.sum())),
    ("reads", lambda: f"{AWAY.norm():.3f}"),
    ("reads", lambda: bool((AWAY > 0).all())),
    ("reads", lambda: torch.equal(AWAY, OTHER)),
    ("reads", lambda: AWAY[AWAY > 0]),
    ("reads", lambda: AWAY.tolist()),
    ("reads", lambda: AWAY.detach().numpy()),
    ("reads", lambda: nn.functional.linear(torch.ones(2, 4), AWAY)),
    ("writes into", lambda: AWAY.data.add_(HERE.data)),
    ("writes into", lambda: AWAY.data.copy_(HERE)),
    ("writes into", lambda: setattr(AWAY, "data", HERE.data)),
    ("writes into", lambda: torch._foreach_add_([HERE.data, AWAY.data], [HERE.data] * 2)),
    ("draws random numbers for", lambda: nn.init.normal_(AWAY)),
    ("draws random numbers for", lambda: AWAY + torch.randn_like(AWAY)),
    ("draws random numbers for", lambda: nn.init.trunc_normal_(AWAY)),
    ("draws random numbers for", lambda: nn.init.orthogonal_(AWAY)),
    ("writes into", lambda: AWAY.data.add_(torch.randn(AWAY.shape, device=AWAY.device))),
    ("writes into the gradient of", lambda: setattr(AWAY, "grad", torch.ones(3, 4))),
    ("saves", lambda: torch.save(AWAY, io.BytesIO())),
    ("reads the gradient of", lambda: nn.utils.clip_grad_norm_([HERE, AWAY], 1.0)),
]


@pytest.mark.parametrize(("verb", "read"), READS)
def test_what_needs_values_is_refused_with_the_line(verb: str, read: Callable[[], object]) -> None:
    before = HERE.detach().clone()
    with pytest.raises(TrainingError) as refusal:
        read()
    said = str(refusal.value)
    assert said.startswith(f"this script {verb} a value that this rank does not have, at ")
    assert "test_absent.py:" in said
    assert "is a parameter of another pipeline stage" in said
    assert "merak.average_teacher" in said
    assert torch.equal(HERE, before)


def test_callbacks_are_named() -> None:
    with read_by("a callback"), pytest.raises(TrainingError, match=r"^a callback reads a value"):
        AWAY.sum().item()
    with pytest.raises(TrainingError, match=r"^this script reads a value"):
        AWAY.sum().item()


def test_lists_that_were_made_before_have_what_takes_the_place() -> None:
    old = nn.Parameter(torch.ones(3, 4), requires_grad=False)
    made_before = [old]
    assert swap(old, parameter())
    assert isinstance(made_before[0], AbsentTensor)
    assert isinstance(made_before[0], nn.Parameter)


def test_copies_of_a_module_keep_its_parameters() -> None:
    module = nn.Linear(4, 3)
    module.weight = parameter().requires_grad_(False)
    copied = copy.deepcopy(module)
    assert isinstance(copied.weight, AbsentTensor)
    assert [(n, p.requires_grad) for n, p in copied.named_parameters()] == [
        ("weight", False),
        ("bias", True),
    ]


def test_writes_into_what_no_rank_has_whole_are_refused() -> None:
    sharded = nn.Parameter(AbsentTensor(torch.empty(2, device="meta"), f"'w' is {OF_REPLICAS}"))
    assert isinstance(sharded.detach().clone().mul_(2.0), AbsentTensor)
    for write in (
        lambda: sharded.data.mul_(0.5),
        lambda: sharded.detach().view(-1).zero_(),
        lambda: setattr(sharded, "data", sharded.data * 2),
    ):
        with pytest.raises(TrainingError, match=r"^this script writes into a value"):
            write()
