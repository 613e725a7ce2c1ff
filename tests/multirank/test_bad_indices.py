"""A token id beyond the vocabulary, where the table and the loss are split over ranks."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import transformers

from merak.core.errors import DataError
from tests.multirank.ranks import RankPool
from tests.tiers import slow


def sentences_of(degrees: Mapping[str, int]) -> list[str]:
    """What a step and an evaluation say of an id and a label beyond the vocabulary."""
    import merak

    merak.init(**degrees, device="cpu")  # type: ignore[arg-type]
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 31, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    ids = torch.zeros(2, 8, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids}
    model = merak.parallelize(transformers.GPT2LMHeadModel(config), batch)
    model.step(batch)
    bad = ids.clone()
    bad[1, 3] = 31  # padding of the last rank's rows, where tp=2 splits them
    said = []
    for wrong in ({**batch, "input_ids": bad}, {**batch, "labels": bad}):
        for act in (model.step, model.evaluate):
            with pytest.raises(DataError) as caught:
                act(wrong)
            said.append(str(caught.value))
    assert torch.isfinite(model.step(batch))
    return said


@pytest.mark.parametrize("degrees", [{"tp": 2}, slow({"pp": 2})])
def test_an_index_beyond_the_vocabulary(pool: RankPool, degrees: dict[str, int]) -> None:
    for ids, _, labels, evaluated in pool.run(sentences_of, 2, degrees):
        assert "in step 2, column 'input_ids' holds the index 31, but transformer.wte.weight" in ids
        assert "of 31 rows takes 0 to 30; use the tokenizer" in ids
        assert "in step 2, column 'labels' gives the index 31, but the loss over 31" in labels
        assert "in an evaluation, column 'labels' gives the index 31" in evaluated
