"""CTC losses in a trace: as eager has them, whatever the number of labels in a batch is."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import ctc_loss

from merak.graph.joint.segment import joint_obstacle
from merak.graph.trace.normalize import is_random
from tests.tiers import one_in
from tests.unit.graph.joint_parity import assert_bits_of_autograd
from tests.unit.graph.speech import FRAMES, KINDS, LETTERS, Indexed, Listener, speech
from tests.unit.graph.stages import assert_like_eager, built


class Counted(Listener):
    """The labels picked go into something else as well."""

    def loss(self, told: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        is_label = labels >= 0
        picked = labels.masked_select(is_label)
        return ctc_loss(told, picked, lengths, is_label.sum(-1)) * picked.float().mean()


@one_in(2)
@pytest.mark.parametrize("kind", [*KINDS, Counted], ids=lambda kind: kind.__name__)
def test_as_eager(kind: type[Listener]) -> None:
    """One trace for batches with different numbers of labels."""
    model = kind()
    graph, batches = built(model, speech(0)), [speech(seed) for seed in range(3)]
    for batch in batches:
        assert_like_eager(graph, model, batch, {"rtol": 0.0, "atol": 0.0})
    assert len({int((batch["labels"] >= 0).sum()) for batch in batches}) > 1


@one_in(2)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_forward_and_backward_are_operators_of_a_graph(kind: type[Listener]) -> None:
    """Bits are autograd's, with other labels than those of the graph."""
    model = kind()
    graph = built(model, speech(0))
    segment = graph.segments[-1]
    if kind is Indexed:  # labels of int32, for which cuDNN may compute the loss
        assert joint_obstacle(segment.graph) == "it calls ctc_loss"
        return
    assert_bits_of_autograd(graph, model, segment, speech(1))


def test_no_gradient_and_no_draw() -> None:
    graph = built(KINDS[1](), speech(0), training=False)
    losses = [n for s in graph.segments for n in s.graph.nodes if "ctc_loss" in str(n.target)]
    assert len(losses) == 1
    assert not is_random(losses[0])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_without_numbers(reduction: str) -> None:
    """The shape is the loss's, and what is kept for the backward is as much as it keeps."""

    def loss(told: torch.Tensor, labels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        args = (None, lengths, (labels >= 0).sum(-1), 0, reduction, False, True)
        made: torch.Tensor = torch.ops.merak.ctc_loss(told, labels, *args)
        return made

    def kept(tensors: list[torch.Tensor]) -> int:
        return sum(
            {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()
        )

    sizes, shapes = [], []
    for mode in (FakeTensorMode(), torch.device("cpu")):
        saved: list[torch.Tensor] = []
        with mode:
            told = torch.zeros(FRAMES, 4, LETTERS).log_softmax(-1).requires_grad_()
            labels = torch.ones(4, 5, dtype=torch.long)
            lengths = torch.full((4,), FRAMES, dtype=torch.long)
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, saved=saved: saved.append(t) or t, lambda t: t
            ):
                made = loss(told, labels, lengths)
        sizes.append(kept([t for t in saved if t.dtype.is_floating_point]))
        shapes.append(made.shape)
    assert shapes[0] == shapes[1] == ((4,) if reduction == "none" else ())
    fake, real = sizes
    assert abs(real - fake) <= 2 * 4 * 4, sizes  # but for two numbers a sample
