"""What ranks without data are told about a microbatch."""

import pickle

import pytest
import torch

from merak.core.errors import DataError
from merak.core.tensor_meta import TensorMeta
from merak.data import BatchSignature, signature, union


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
