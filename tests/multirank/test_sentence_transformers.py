"""sentence-transformers' trainer on several ranks trains as its own does in one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.multirank.logged import expect_equal
from tests.multirank.ranks import RankPool
from tests.multirank.sentence_jobs import Case, save_words, train, train_alone
from tests.multirank.training import alone
from tests.tiers import slow

pytest.importorskip("sentence_transformers")

RANKING = Case("MultipleNegativesRankingLoss", arguments={"weight_decay": 0.1})
SEVERAL = Case("MultipleNegativesRankingLoss CoSENTLoss TripletLoss", evaluates=True)
GATHERED = Case("MultipleNegativesRankingLoss", {"gather_across_devices": True})
ALL = [
    RANKING,
    SEVERAL,
    GATHERED,
    Case("CoSENTLoss", evaluates=True),
    Case("CosineSimilarityLoss"),
    Case("ContrastiveLoss"),
    Case("OnlineContrastiveLoss"),
    # Some gradients are zero but for rounding, which Adam would make steps of.
    Case("TripletLoss", arguments={"adam_epsilon": 1e-3}),
    Case("MatryoshkaMultipleNegativesRankingLoss"),
    Case("CachedMultipleNegativesRankingLoss", {"mini_batch_size": 2}),
    Case(
        "CachedMultipleNegativesRankingLoss", {"mini_batch_size": 2, "gather_across_devices": True}
    ),
    Case("MatryoshkaCachedMultipleNegativesRankingLoss", {"mini_batch_size": 2}),
    Case(
        "SoftmaxLoss",
        {"embedding_dimension": 32, "num_labels": 2},
        {"max_grad_norm": 0.0, "learning_rate_mapping": {"classifier": 1e-2}},
    ),
    Case("GlobalOrthogonalRegularizationLoss"),
]


def expect_folder(folder: Path, note: str, weights: dict[str, torch.Tensor]) -> None:
    """The folder loads, gives the same embeddings, and has what a subclass's `_save` adds."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    assert (folder / "note.txt").read_text() == note
    assert (folder / "modules.json").is_file() and (folder / "1_Pooling").is_dir()
    found = model.encode(["so say we", "a fox"], convert_to_tensor=True)
    model.load_state_dict(weights)
    expected = model.encode(["so say we", "a fox"], convert_to_tensor=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("layout", "cases"),
    [
        pytest.param((1, 1, 2), [RANKING, SEVERAL], id="pp-essential"),
        pytest.param((2, 1, 1), [GATHERED], id="dp-essential"),
        slow((1, 1, 2), ALL, id="pp"),
        slow((1, 2, 1), ALL, id="tp"),
        slow((2, 1, 1), ALL, id="dp"),
    ],
)
def test_as_in_one_process(
    pool: RankPool, cache: str, tmp_path: Path, layout: tuple[int, ...], cases: list[Case]
) -> None:
    words = str(tmp_path / "words")
    save_words(words)
    with alone():
        expected = [train_alone(case, words, dp=layout[0]) for case in cases]
    saved = tmp_path / "saved"
    cases = [replace(cases[0], saved_in=str(saved)), *cases[1:]]
    outcomes = pool.run(train, 2, layout, cases, words, cache)
    for case, found, wanted in zip(cases, outcomes[0], expected, strict=True):
        if case.loss == "SoftmaxLoss":  # of whose classifier the package's norm knows nothing
            for log in (*found.logs, *wanted.logs):
                log.pop("grad_norm", None)
        expect_equal(found, wanted)
    expect_folder(saved / "last", "step 20", outcomes[0][0].weights)
    expect_folder(saved / "checkpoint-20", "step 20", outcomes[0][0].weights)
