"""Cross entropy of heads in chunks: values, gradients, rows that are left out, and memory."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from merak.core.storages import Storages
from merak.ops.chunked_loss import (
    ChunkedHead,
    chunk_gradients,
    chunk_losses,
    chunk_losses_and_gradients,
    chunked_cross_entropy,
    scale_gradients,
)

ROWS, HIDDEN, CLASSES = 13, 8, 23
WHOLE = (1, CLASSES, "")
CAPPED = (("div", 30.0), ("tanh", None), ("mul", 30.0))
STEPS = ((), CAPPED, (("tanh", None),), (("mul", 0.5), ("add", 1.0)))


def head(steps: Any = (), smoothing: float = 0.0, one_pass: bool = False) -> ChunkedHead:
    return ChunkedHead(steps, -100, smoothing, WHOLE, 4, one_pass)


def tensors(dtype: torch.dtype, is_ignored: bool) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What a head reads, its weight and bias, and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, HIDDEN), (CLASSES, HIDDEN), (CLASSES,))
    read = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    target = torch.randint(0, CLASSES, (ROWS,), generator=generator)
    if is_ignored:
        target[2:7] = -100
    return read, target


def whole(read: list[torch.Tensor], target: torch.Tensor, steps: Any, **how: Any) -> torch.Tensor:
    """The loss of all logits, in float64."""
    logits = functional.linear(*(tensor.double() for tensor in read))
    for name, number in steps:
        logits = logits.tanh() if name == "tanh" else getattr(logits, name)(number)
    return functional.cross_entropy(logits, target, **how)


@pytest.mark.parametrize("steps", STEPS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 5e-2)]
)
def test_losses_and_gradients_are_those_of_all_logits(
    steps: Any, dtype: torch.dtype, within: float
) -> None:
    names = ("none", "mean", "sum")
    weighs = torch.linspace(0.5, 1.5, CLASSES, dtype=torch.float64)
    for one_pass, reduction, smoothing, is_weighted, is_ignored in itertools.product(
        (False, True), range(3), (0.0, 0.1), (False, True), (False, True)
    ):
        read, target = tensors(dtype, is_ignored)
        weight = weighs if is_weighted else None
        how = {"reduction": names[reduction], "label_smoothing": smoothing, "weight": weight}
        expected = whole(read, target, steps, **how)
        gradient = torch.linspace(0.5, 1.5, expected.numel()).view(expected.shape)
        given = None if weight is None else weight.to(torch.promote_types(dtype, torch.float32))
        own = head(steps, smoothing, one_pass)
        found = chunked_cross_entropy(*read, target, given, reduction, own)
        pairs = zip(
            (found, *torch.autograd.grad(found, read, gradient.to(found.dtype))),
            (expected, *torch.autograd.grad(expected, read, gradient.double())),
            strict=True,
        )
        for one, other in pairs:
            assert float((one.double() - other).detach().norm() / other.detach().norm()) < within


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    "wanted", [w for w in itertools.product((False, True), repeat=3) if any(w)]
)
def test_frozen_tensors_get_no_gradient(wanted: tuple[bool, bool, bool], one_pass: bool) -> None:
    read, target = tensors(torch.float64, is_ignored=False)
    for tensor, is_wanted in zip(read, wanted, strict=True):
        tensor.requires_grad_(is_wanted)
    trained = [tensor for tensor in read if tensor.requires_grad]
    found = chunked_cross_entropy(*read, target, None, 1, head(one_pass=one_pass))
    expected = whole(read, target, ())
    pairs = zip(*(torch.autograd.grad(one, trained) for one in (found, expected)), strict=True)
    for own, other in pairs:
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("one_pass", [False, True])
def test_a_batch_without_a_label_has_a_sum_of_zero(one_pass: bool) -> None:
    read, target = tensors(torch.float32, is_ignored=False)
    own = head(one_pass=one_pass)
    loss = chunked_cross_entropy(*read, torch.full_like(target, -100), None, 2, own)
    assert loss == 0
    assert not any(gradient.any() for gradient in torch.autograd.grad(loss, read))


def test_a_target_that_is_no_class_fails() -> None:
    read, target = tensors(torch.float32, is_ignored=True)
    target[-1] = CLASSES
    with pytest.raises((RuntimeError, IndexError)):
        chunked_cross_entropy(*read, target, None, 1, head())


def test_ignored_rows_are_left_out_before_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    linear = functional.linear

    def counted(x: torch.Tensor, *args: Any) -> torch.Tensor:
        rows.append(len(x))
        return linear(x, *args)

    monkeypatch.setattr("merak.ops.chunked_loss.functional.linear", counted)
    read, target = tensors(torch.float32, is_ignored=True)
    chunked_cross_entropy(*read, target, None, 1, head()).backward()
    assert rows == [4, 4, 4, 4]  # eight rows in two chunks, forward and backward
    rows.clear()
    loss = chunked_cross_entropy(*read, target, None, 1, head(one_pass=True))
    assert rows == [4, 4]
    loss.backward()
    assert rows == [4, 4]


@pytest.mark.parametrize("one_pass", [False, True])
def test_sums_over_chunks_are_not_rounded(one_pass: bool) -> None:
    """A sum in bfloat16 would stop to grow where a chunk's part is below its last digit."""
    num_rows = 1024
    x = torch.ones(num_rows, 1, dtype=torch.bfloat16)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    target = torch.zeros(num_rows, dtype=torch.int64)
    how = ChunkedHead((), -100, 0.0, (1, 2, ""), 1, one_pass)
    chunked_cross_entropy(x, weight, None, target, None, 2, how).backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[-num_rows / 2], [num_rows / 2]]


def test_a_scaled_gradient_is_rounded_once() -> None:
    """In bfloat16, a third itself would be too small by a sixth of a percent, for all rows."""
    gradient = torch.full((8, 4), 3.0, dtype=torch.bfloat16)
    (found,) = scale_gradients(torch.tensor(1 / 3), 3, gradient)
    assert found is gradient
    assert (found == 1).all()


@pytest.mark.parametrize("steps", [(), CAPPED], ids=["plain", "capped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_classes", [152_064, 152_064 // 2])
def test_memory_beyond_gradients_is_that_of_two_chunks(
    steps: Any, dtype: torch.dtype, num_classes: int
) -> None:
    """Of 32,768 tokens, with all classes of a large vocabulary, or half of them."""
    num_rows, hidden, chunk_bytes = 32_768, 1024, 2**29
    how = ChunkedHead(steps, -100, 0.0, (1, num_classes, ""), chunk_bytes // 4 // num_classes)
    with FakeTensorMode():
        x = torch.empty(num_rows, hidden, dtype=dtype)
        weight = torch.empty(num_classes, hidden, dtype=dtype)
        target = torch.empty(num_rows, dtype=torch.int64)
        rows = torch.empty(num_rows)
        read = (x, weight, None, target, rows, None)
        with Storages((x, weight, target, rows)) as there:
            results = chunk_losses(*read, *how)
        assert there.peak_bytes < sum(one.nbytes for one in results) + 2 * chunk_bytes
        with Storages((x, weight, target, rows)) as back:
            results = chunk_gradients(rows, *read, rows, (True, True, False), *how)
        assert back.peak_bytes < sum(one.nbytes for one in results) + 2 * chunk_bytes
        with Storages((x, weight, target, rows)) as both:
            results = chunk_losses_and_gradients(*read, (True, True, False), *how)
            made = sum(one.nbytes for one in results)
            scale_gradients(torch.ones(()), how.rows, *results[1:])
        assert both.peak_bytes < made + 2 * chunk_bytes
    assert 2 * chunk_bytes < num_rows * num_classes * 4
