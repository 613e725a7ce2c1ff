"""Masks, positions, plain arguments and further outputs: gradients are those of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import merak
from merak.check import CheckOptions, Job, Layout
from merak.check.reference import reference
from merak.core.errors import DataError
from tests.multirank import inputs
from tests.multirank.check_on import check_on
from tests.multirank.inputs import IMAGE, SHOWN, TEXT, Way
from tests.multirank.ranks import RankPool
from tests.tiers import slow

EAGER, SDPA = {"attn_implementation": "eager"}, {"attn_implementation": "sdpa"}
CLIP = {"text_config": TEXT, "vision_config": IMAGE, "projection_dim": 16}
WAYS = {
    "a boolean mask, padded left": Way(
        "BertForTokenClassification",
        TEXT | EAGER,
        partial(inputs.padded, target=inputs.tags, side="left", dtype=torch.bool),
    ),
    "token types and positions": Way(
        "BertForQuestionAnswering", TEXT | SDPA, partial(inputs.in_turns, target=inputs.answers)
    ),
    "a boolean mask by pair": Way(
        "LlamaForCausalLM",
        TEXT | SDPA,
        partial(inputs.by_pair, target=inputs.next_words, dtype=torch.bool),
    ),
    "an added mask by pair": Way(
        "LlamaForCausalLM",
        TEXT | EAGER,
        partial(inputs.by_pair, target=inputs.next_words, dtype=torch.float32),
    ),
    "positions behind padding": Way(
        "LlamaForCausalLM", TEXT | SDPA, partial(inputs.counted, target=inputs.next_words)
    ),
    "None and truth values": Way(
        "BertForSequenceClassification",
        TEXT,
        inputs.a_class,
        {"attention_mask": None, "token_type_ids": None, "return_dict": False},
    ),
    "hidden states and attentions": Way(
        "BertForSequenceClassification", TEXT | EAGER | SHOWN, inputs.a_class
    ),
    "a number to regress": Way(
        "BertForSequenceClassification", TEXT | {"num_labels": 1}, inputs.a_number
    ),
    "several classes at once": Way(
        "LlamaForSequenceClassification", TEXT | {"num_labels": 3}, inputs.several_classes
    ),
    "pairs": Way("CLIPModel", CLIP, inputs.images, {"return_loss": True}),
}


ESSENTIAL = ("token types and positions", "an added mask by pair", "pairs")


@pytest.mark.parametrize("name", [n if n in ESSENTIAL else slow(n) for n in WAYS])
def test_gradients_of_a_way_of_calling(pool: RankPool, name: str) -> None:
    options = CheckOptions(num_microbatches=2, steps=2)
    case = WAYS[name].case(name)
    expected = reference(Job(case, Layout(), options))
    for layout in (Layout(pp=2), Layout(tp=2)):
        check_on(pool, Job(case, layout, options), expected)


def train_pairs(argument: bool) -> list[float]:
    """Losses of two steps on batches that say return_loss, and that of another argument."""
    merak.init(pp=2, device="cpu")
    case = WAYS["pairs"].case("pairs")
    batch = {**case.batch(0, 8), "return_loss": argument}
    parallel = merak.parallelize(
        case.model(3), batch, num_microbatches=2,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    )  # fmt: skip
    with pytest.raises(DataError, match=r"return_loss=True .* has return_loss=False"):
        parallel.step({**batch, "return_loss": False})
    return [float(parallel.step(batch)), float(parallel.evaluate(batch))]


def test_a_batch_may_say_return_loss(pool: RankPool) -> None:
    case = WAYS["pairs"].case("pairs")
    model, batch = case.model(3), case.batch(0, 8)
    parts = [{name: column.chunk(2)[i] for name, column in batch.items()} for i in range(2)]

    def loss() -> torch.Tensor:
        return torch.stack([model(**part, return_loss=True).loss for part in parts]).mean()

    expected = [loss()]
    expected[0].backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    expected.append(loss())
    for found in pool.run(train_pairs, 2, True):
        assert found == pytest.approx([value.item() for value in expected], rel=1e-5)
