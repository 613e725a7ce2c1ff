"""What ranks without data are told about a microbatch."""

import pickle
import sys

import pytest
import torch
from torch.overrides import TorchFunctionMode

from merak.core.errors import DataError
from merak.core.tensor_meta import TensorMeta
from merak.data import BatchSignature, agreed, signature, signatures, union


def test_a_signature_is_the_shapes_of_a_batch():
    batch = {"labels": torch.zeros(2), "input_ids": torch.zeros(2, 3, dtype=torch.int64)}
    told = signature(batch)
    assert told.names == ("input_ids", "labels")
    assert told["input_ids"] == TensorMeta((2, 3), torch.int64)
    assert told["labels"] == TensorMeta((2,), torch.float32)
    assert told == signature(dict(reversed(batch.items())))
    assert {told: 1}[pickle.loads(pickle.dumps(told))] == 1


def test_no_microbatch():
    assert not signature({})
    assert signature({"x": torch.zeros(1)})


def test_columns_of_several_ranks_make_the_whole():
    ids, labels = {"input_ids": torch.zeros(2, 3)}, {"labels": torch.zeros(2)}
    assert union(signature(labels), BatchSignature(()), signature(ids)) == signature(ids | labels)
    with pytest.raises(DataError, match=r"'labels' of the same microbatch as \(2,\) torch.float32"):
        union(signature(labels), signature({"labels": torch.zeros(3)}))


def test_a_column_that_is_no_tensor_is_refused():
    with pytest.raises(DataError, match="column 'text' of the batch is a list, not a tensor"):
        signature({"text": ["a"]})


def test_a_sparse_column_is_refused():
    with pytest.raises(DataError, match="'adjacency' of the batch is a tensor of layout"):
        signature({"adjacency": torch.eye(2).to_sparse()})


def masked(zeros: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 3, dtype=torch.int64)
    mask.view(-1)[6 - zeros :] = 0
    return {"mask": mask, "x": torch.ones(2, 3), "label": torch.ones(2, dtype=torch.int64)}


def test_a_mask_of_ones_is_known() -> None:
    assert [name for name, meta in signature(masked(0)).columns if meta.ones] == ["mask"]
    assert not any(meta.ones for _, meta in signature(masked(1)).columns)
    assert not signature({"mask": torch.ones(0, 3, dtype=torch.bool)})["mask"].ones


def test_ones_are_known_where_all_ranks_and_replicas_see_them() -> None:
    full, padded = signature(masked(0)), signature(masked(2))
    assert union(full, padded)["mask"].ones is union(padded, full)["mask"].ones is False
    assert agreed((full, padded), may_change=False) == (padded, padded)
    assert agreed((full, full), may_change=True) == (padded, padded)
    nothing = BatchSignature(())
    assert agreed((full, nothing), may_change=False) == (full, nothing)


@pytest.mark.parametrize(
    ("mask", "labels", "known"),
    [
        ([[1, 1, 1], [1, 1, 0]], [[5, 6, 7], [5, 6, -100]], True),
        ([[1, 1, 1], [1, 1, 0]], [[5, 6, -100], [5, 6, 7]], False),
        ([[1, 1, 1], [1, 0, 1]], [[5, 6, 7], [5, -100, -100]], False),
        ([[1, 1, 1], [0, 1, 1]], [[5, 6, 7], [-100, 6, 7]], False),
        ([[1, 1, 1], [1, 2, 0]], [[5, 6, 7], [5, 6, -100]], False),
        ([[1, 1, 1], [1, 1, 1]], [[5, 6, 7], [5, 6, 7]], True),
    ],
)
def test_labels_that_are_ignored_behind_the_ends_of_samples(mask, labels, known) -> None:
    batch = {"mask": torch.tensor(mask), "labels": torch.tensor(labels)}
    found = signature(batch, ends=True)
    assert found["mask"].ignored == (("labels",) if known else ())
    assert signature(batch)["mask"].ignored == ()
    parts = [signature({name: batch[name]}, ends=True) for name in batch]
    assert union(*parts)["mask"].ignored == () and union(found, *parts) == found
    full = signature({"mask": torch.ones_like(batch["mask"]), "labels": batch["labels"]}, ends=True)
    assert agreed((found, full), may_change=False)[1] == found


def test_columns_elsewhere_are_not_looked_at() -> None:
    """The host would wait for them."""
    elsewhere = torch.ones(2, 3, dtype=torch.int64, device="meta")
    ((_, meta),) = signature({"mask": elsewhere}, ends=True).columns
    assert not meta.ones and not meta.ignored


class Reads(TorchFunctionMode):
    """Counts what a GPU would be waited for."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += getattr(func, "__name__", "") == "cpu"
        return func(*args, **(kwargs or {}))


def test_masks_on_an_accelerator_are_read_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, ones = torch.full((2, 3), 7), torch.ones(2, 3, dtype=torch.int32)
    padded = torch.tensor([[1, 1, 0], [1, 1, 1]])
    labels = torch.tensor([[5, 6, -100], [5, 6, 7]])
    batches = [
        {"ids": ids, "mask": ones, "w": torch.ones(2, 3)},
        {"mask": padded, "labels": labels},
    ]
    on_host = signatures(batches)
    assert on_host[0]["mask"].ones and on_host[1]["mask"].ignored == ("labels",)
    own = sys.modules["merak.data.signature"]
    monkeypatch.setattr(own, "_is_away", lambda column: True)
    with Reads() as reads:
        assert signatures(batches, ["mask"]) == on_host
        assert reads.count == 1
        signatures(batches, ["other"])
        assert reads.count == 1


def test_columns_on_a_device_are_not_looked_at_unasked() -> None:
    batch = {"mask": torch.ones(2, 3, dtype=torch.int64, device="meta")}
    assert not signatures([batch], ["mask"])[0]["mask"].ones
