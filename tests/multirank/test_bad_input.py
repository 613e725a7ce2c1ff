"""What every rank says of bad input, and that none of them waits for another."""

from __future__ import annotations

import itertools
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from merak.core.errors import MerakError, TrainingError
from tests.multirank.ranks import RankPool
from tests.multirank.training import (
    VOCABULARY,
    Setup,
    Texts,
    Uneven,
    loss_of_logits,
    make_merak,
)
from tests.tiers import slow
from tests.unit.graph.tensor_parallel_cases import GPT2, LLAMA


def sentence_of(case: str, degrees: Mapping[str, int]) -> str:
    """The sentence of the `MerakError` that a case raises on this rank."""
    import merak

    merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(MerakError) as caught:
        CASES[case]()
    return str(caught.value)


def _parallelize(model: nn.Module, batch: Mapping[str, torch.Tensor], **options: Any) -> None:
    import merak

    merak.parallelize(model, batch, **options)


def _tokens(size: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.zeros(size, 8, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def _gpt2(**config: Any) -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 24, "n_head": 4, "vocab_size": 32, "n_positions": 8}
    tokens = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**sizes, **tokens, **config}))


def _llama(**config: Any) -> nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 32}
    sizes |= {"num_key_value_heads": 2, "intermediate_size": 48}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **config}))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > 0:  # the line that cannot be traced
            y = -y
        return y.sum()


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.linear(x)}


class Communicates(Branches):
    """A model that sums on one rank alone, which no operator over replicas does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if dist.is_initialized():
            dist.reduce(y, 0)
        return y.sum()


class Columns(Dataset[dict[str, torch.Tensor]]):
    """Samples with some columns."""

    def __init__(self, *names: str, size: int = 8) -> None:
        self.names = names
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: torch.ones(8, dtype=torch.long) for name in self.names}


class Nothing(IterableDataset[dict[str, torch.Tensor]]):
    """A stream that ends before it begins."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return iter(())


class Short(IterableDataset[dict[str, torch.Tensor]]):
    """A stream whose epoch ends within its second step."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (Texts(20, padded=False)[i] for i in range(20))


def _train(**kwargs: Any) -> None:
    make_merak(Setup("bert", arguments={"max_steps": 2}), 1, "", **kwargs).train()


class Extra(Uneven):
    """A model with a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {}


def _train_extra(**arguments: Any) -> None:
    trainer = make_merak(Setup("plain", arguments=arguments), 1, "")
    trainer.model.__class__ = Extra
    trainer.train()


def _folder_of_all_ranks() -> str:
    return os.path.join(tempfile.gettempdir(), f"merak-{os.getppid()}")


def _table(*names: str) -> Any:
    import datasets  # type: ignore[import-untyped]

    return datasets.Dataset.from_dict({name: [[1] * 8] * 8 for name in names})


def _step_with_ragged_batch() -> None:
    import merak

    model = merak.parallelize(_gpt2(), _tokens(4), num_microbatches=2)
    model.step(_tokens(3))


CASES: dict[str, Callable[[], None]] = {
    "stages": lambda: _parallelize(NoLoss(), {"x": torch.ones(2, 2)}, loss_fn=_sum_of_logits),
    "heads": lambda: _parallelize(_gpt2(n_head=3), _tokens(), feature_dict=GPT2),
    "kv-heads": lambda: _parallelize(
        _llama(num_attention_heads=6, num_key_value_heads=3), _tokens(), feature_dict=LLAMA
    ),
    "nothing to split": lambda: _parallelize(_gpt2(n_embd=21, n_head=3, n_inner=33), _tokens()),
    "batch": lambda: _parallelize(_gpt2(), _tokens(4), num_microbatches=3),
    "ragged step": _step_with_ragged_batch,
    "does not trace": lambda: _parallelize(Branches(), {"x": torch.ones(2, 2)}),
    "communicates": lambda: _parallelize(Communicates(), {"x": torch.ones(2, 2)}),
    "no loss": lambda: _parallelize(NoLoss(), {"x": torch.ones(2, 2)}),
    "no labels": lambda: _train(train_dataset=Columns("input_ids")),
    "no inputs": lambda: _train(train_dataset=Columns("labels")),
    "no inputs in a table": lambda: _train(train_dataset=_table("labels", "text")),
    "empty": lambda: _train(train_dataset=Columns("input_ids", size=0)),
    "empty stream": lambda: _train(train_dataset=Nothing()),
    "left over": lambda: make_merak(
        Setup("plain", arguments={"max_steps": 3, "schedule": "pipedream"}),
        1,
        "",
        train_dataset=Short(),
    ).train(),
    "empty evaluation": lambda: make_merak(Setup("bert"), 1, "").evaluate(
        Columns("labels", size=0)
    ),
    "later evaluation": lambda: make_merak(
        Setup("bert", arguments={"eval_strategy": "steps", "eval_steps": 1000}),
        1,
        "",
        eval_dataset=Columns("labels"),
    ).train(),
    "later save": lambda: _train_extra(
        save_strategy="steps", save_steps=1000, output_dir=_folder_of_all_ranks()
    ),
    "no dataset": lambda: _train(train_dataset=None),
    "not a number": lambda: make_merak(
        Setup("bert", arguments={"learning_rate": 1e30}), 1, ""
    ).train(),
}


def _sum_of_logits(outputs: Any, batch: Any) -> torch.Tensor:
    total: torch.Tensor = outputs["logits"].sum()
    return total


PP, TP = {"pp": 2}, {"tp": 2}
EXPECTED: list[tuple[str, dict[str, int], str]] = [
    ("stages", PP, r"\d+ segments? cannot fill 2 stages \(pp=2\); use pp ≤ \d"),
    ("heads", TP, r"tp=2 does not divide the 3 heads of transformer\.h\.0\.attn\.c_attn; the deg"),
    ("kv-heads", TP, r"the 3 kv-heads of model\.layers\.0\.self_attn\.k_proj; the degrees"),
    (
        "nothing to split",
        TP,
        r"tp=2 can split nothing .* transformer\.h\.0\.attn\.c_attn\.weight into 3, .*c_fc\.weight "
        r"into 33, .* degrees that split something are 1, 3, 7, 11, 21, 33\.",
    ),
    ("batch", PP, r"'input_ids' has 4 samples, which do not divide into 3 microbatches; use"),
    ("ragged step", PP, r"'input_ids' has 3 samples, which do not divide into 2 microbatches"),
    ("does not trace", PP, r"test_bad_input\.py:\d+: `if y\.sum\(\) > 0:.*torch\.where"),
    ("communicates", PP, r"test_bad_input\.py:\d+: `dist\.reduce\(y.* with other ranks"),
    ("no loss", PP, r"returns no loss for the columns x; it returns logits\. Give it"),
    ("no labels", PP, r"returns no loss for the columns input_ids; it returns logits\. Give it"),
    (
        "no inputs",
        PP,
        r"needs column 'input_ids', but the batch has labels; BertForMaskedLM\.forward takes",
    ),
    (
        "no inputs in a table",
        PP,
        r"column 'input_ids'.*dataset has labels, text\); BertForMaskedLM\.forward takes input_ids",
    ),
    ("empty", PP, r"the training dataset is empty; give one with at least one sample"),
    ("empty stream", PP, r"the training dataset yields no samples; give one"),
    ("left over", PP, r"ends within step 2, and an asynchronous schedule cannot add its gradients"),
    ("empty evaluation", PP, r"the evaluation dataset is empty; give one"),
    ("later evaluation", PP, r"needs column 'input_ids', but the batch has labels; BertFor"),
    ("later save", PP, r"_extra_state of the state dict is neither a parameter nor a buffer but"),
    ("no dataset", PP, r"nothing to train on; pass train_dataset=…"),
    ("not a number", PP, r"step \d+ has loss nan and gradient norm nan; .*nan_policy='skip'"),
]


@pytest.mark.parametrize("case,degrees,pattern", EXPECTED, ids=[f"{e[0]} {e[1]}" for e in EXPECTED])
def test_every_rank_raises_the_sentence(
    pool: RankPool, case: str, degrees: dict[str, int], pattern: str
) -> None:
    sentences = pool.run(sentence_of, 2, case, degrees)
    for sentence in sentences:
        assert re.search(pattern, sentence), sentence
        assert "\n" not in sentence
    assert sentences[0] == sentences[1]


def skip_steps(degrees: Mapping[str, int]) -> list[Any]:
    """Parameters around steps of which the third has no finite loss, on this rank."""
    import merak

    mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    seen: list[Any] = []

    class Parameters(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append({n: p.detach().clone() for n, p in trainer.engine.parameters.items()})

    # A step takes 16 samples in the dataset's order; sample 36 is on one replica of step 3.
    arguments = {"max_steps": 5, "nan_policy": "skip", "train_sampling_strategy": "sequential"}
    setup = Setup("plain", arguments=arguments)
    trainer = make_merak(
        setup,
        mesh.dp,
        "",
        compute_loss_func=loss_or_nothing,
        train_dataset=Texts(80, padded=False),
        callbacks=[Parameters()],
    )
    trainer.train_dataset.ids[36] = VOCABULARY - 1
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
    return [seen, rates]


def loss_or_nothing(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any) -> torch.Tensor:
    """Infinite for a sample whose labels are all the last token."""
    loss = loss_of_logits(outputs, labels, num_items_in_batch)
    is_bad = ((labels == VOCABULARY - 1) | (labels == -100)).all(dim=1).any()
    return loss / (~is_bad).to(loss.dtype)


@pytest.mark.parametrize("degrees", [{"pp": 2}, slow({"dp": 2})])
def test_a_step_is_skipped_everywhere(pool: RankPool, degrees: dict[str, int]) -> None:
    for seen, rates in pool.run(skip_steps, 2, degrees):
        assert len(seen) == 5
        moved = [
            any(not torch.equal(before[name], after[name]) for name in before)
            for before, after in itertools.pairwise(seen)
        ]
        assert moved == [True, False, True, True]
        assert all(torch.isfinite(value).all() for value in seen[-1].values())
        assert rates[1] != rates[2]  # the rate of a step that was skipped is used again
        assert rates[2] == rates[3]


def diverge(degrees: Mapping[str, int]) -> dict[str, Any]:
    """A job whose losses are not finite from the third step on."""
    import merak

    mesh = merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    arguments = {
        "max_steps": 20, "nan_policy": "skip", "max_skipped_steps": 3, "logging_steps": 1,
        "train_sampling_strategy": "sequential",
    }  # fmt: skip
    trainer = make_merak(
        Setup("plain", arguments=arguments),
        mesh.dp,
        "",
        compute_loss_func=loss_or_nothing,
        train_dataset=Texts(320, padded=False),
    )
    trainer.train_dataset.ids[32:] = VOCABULARY - 1
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    return {"said": str(caught.value), "losses": losses, "steps": trainer.state.global_step}


@pytest.mark.parametrize("degrees", [{"pp": 2}, slow({"dp": 2})])
def test_a_diverged_model_is_not_skipped_for_ever(pool: RankPool, degrees: dict[str, int]) -> None:
    for found in pool.run(diverge, 2, degrees):
        assert "step 6 has loss" in found["said"]
        assert "and the 3 steps before it were skipped too" in found["said"]
        assert found["steps"] == 5
        is_finite = [math.isfinite(loss) for loss in found["losses"]]
        assert is_finite == [True, True, False, False, False]
