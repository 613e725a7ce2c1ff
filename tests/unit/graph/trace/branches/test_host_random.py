"""Masks drawn with NumPy or Python: the traced model does what eager does with the same draws."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import nn

from merak.core.errors import TraceError
from merak.graph.trace.branches.rng_stream import is_stream_draw
from tests.tiers import one_in
from tests.unit.graph.dropped_layers import WIDTH, Batch, Stack, plain_batch
from tests.unit.graph.masked import Lengthy, Masked, Replaced, same_masks
from tests.unit.graph.stages import Pipeline, assert_like_eager, built, gradients_of


def lengthy_batch() -> Batch:
    return {**plain_batch(), "lengths": torch.tensor([3, WIDTH, 5])}


MODELS = {Masked: plain_batch, Replaced: plain_batch, Lengthy: lengthy_batch}


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_as_eager(kind: type[Stack]) -> None:
    model, batch = kind(), MODELS[kind]()
    pipeline = Pipeline(built(model, batch), model)
    before = random.getstate(), np.random.get_state()[1].tolist()
    losses = set()
    for seed in range(4):
        model.zero_grad()
        torch.manual_seed(seed)
        loss = pipeline.train(batch)
        assert (random.getstate(), np.random.get_state()[1].tolist()) == before
        found = gradients_of(model)
        model.zero_grad()
        torch.manual_seed(seed)
        with same_masks():
            expected = model(**batch)["loss"]
        random.setstate(before[0])
        np.random.seed(0)
        before = random.getstate(), np.random.get_state()[1].tolist()
        expected.backward()
        assert torch.equal(loss, expected.detach())
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(found[name], gradient, msg=name)
        losses.add(loss.item())
    assert len(losses) == 4, "the masks hardly differ"


def test_a_model_of_transformers_draws_masks_and_drops_a_layer() -> None:
    config = transformers.Wav2Vec2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, conv_dim=(8,), conv_stride=(4,), conv_kernel=(4,),
        num_feat_extract_layers=1, num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
        mask_time_prob=0.3, mask_time_length=2, mask_feature_prob=0.3, mask_feature_length=2,
    )  # fmt: skip
    batch = {"input_values": torch.randn(2, 80), "labels": torch.tensor([[1, 2, 3], [4, 5, -100]])}
    graph = built(transformers.Wav2Vec2ForCTC(config).train(), batch)
    drawn = [n.args[1] for n in graph.prologue.graph.nodes if is_stream_draw(n)]
    assert sorted(drawn) == ["aten.rand.default", *["merak.host_random.default"] * 2]


def number() -> int:
    return int(np.random.randint(3))


def growing(size: int) -> NDArray[np.float32]:
    return np.ones(np.random.randint(1, size), dtype=np.float32)


def counted(mask: torch.Tensor) -> NDArray[np.float64]:
    first = np.random.rand(1)
    return first.repeat(int(mask.sum()))


class Inside(Stack):
    """A module draws by itself."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(np.random.rand(WIDTH).astype(np.float32))


class Number(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * number()


class Growing(Stack):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(growing(WIDTH)).sum()


class Learnt(Stack):
    """A mask that hangs on what the model computes."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.tensor(counted(x > 0), dtype=x.dtype).sum()


class Seeded(Stack):
    """Draws what it has seeded itself, as BigBird does for the blocks that its layers see."""

    seed: Any = 3

    def run(self, x: torch.Tensor) -> torch.Tensor:
        np.random.seed(self.seed)
        random.seed(f"{self.seed}")
        order = np.random.permutation(WIDTH)
        return x[..., torch.tensor(order)] * np.random.rand() * random.random()


class SeededAnew(Seeded):
    """Seeds from the machine's noise."""

    seed = None


class SeededLate(Seeded):
    """Draws before it seeds."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return super().run(x * float(np.random.permutation(3)[0]))


REFUSED = {
    SeededAnew: r"NumPy's generator at .*test_host_random.py:\d+",
    SeededLate: r"NumPy's generator at .*test_host_random.py:\d+",
    Inside: r"NumPy's generator at .*test_host_random.py:\d+",
    Number: "test_host_random:number .* gives no array",
    Growing: "test_host_random:growing .* gives arrays of several shapes",
    Learnt: "by something that the model itself computes",
}


@one_in(3)
@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_refused(kind: type[nn.Module]) -> None:
    before = random.getstate(), np.random.get_state()[1].tolist()
    with pytest.raises(TraceError, match=REFUSED[kind]) as refusal:
        built(kind(), plain_batch())
    assert type(refusal.value) is TraceError  # the kinds for the way inside do not get out
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


def test_what_the_model_seeds_itself_is_drawn_alike_in_every_run() -> None:
    model, batch = Seeded(), plain_batch()
    before = random.getstate(), np.random.get_state()[1].tolist()
    pipeline = Pipeline(built(model, batch), model)
    loss = pipeline.train(batch)
    found = gradients_of(model)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    model.zero_grad()
    expected = model(**batch)["loss"]
    expected.backward()
    assert torch.equal(loss, expected.detach())
    for name, gradient in gradients_of(model).items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_block_sparse_attention_sees_the_blocks_of_its_seed() -> None:
    config = transformers.BigBirdConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=128, block_size=2, num_random_blocks=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BigBirdForMaskedLM(config).train()
    ids = torch.randint(32, (2, 24))
    batch = {"input_ids": ids, "labels": ids}
    assert_like_eager(built(model, batch), model, batch)
    assert model.bert.attention_type == "block_sparse"


class Counted(Stack):
    """As many numbers as the batch says."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        noise = torch.from_numpy(counted(mask)).sum().to(x.dtype)
        return {"loss": (self.head(self.embed(x)) * noise).square().mean()}


def test_another_shape_than_in_the_trace_ends_the_step() -> None:
    model = Counted()
    batch = {**plain_batch(), "mask": torch.ones(3, dtype=torch.long)}
    pipeline = Pipeline(built(model, batch), model)
    pipeline.train(batch)
    with pytest.raises(TraceError, match=r"gave torch.float64 of \(2,\) after torch.float64 of"):
        pipeline.train({**batch, "mask": torch.tensor([1, 0, 1])})
