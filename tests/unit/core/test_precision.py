"""A precision that a device lacks is refused with a sentence."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from merak.core.errors import ArgumentsError
from merak.core.precision import check_autocast, read_type

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_the_cpu_has_them_all(autocast: torch.dtype | None) -> None:
    check_autocast(autocast, CPU)


def test_other_types_are_refused() -> None:
    with pytest.raises(ArgumentsError, match=r"autocast=torch.float64 is no precision to train"):
        check_autocast(torch.float64, CPU)


@pytest.mark.parametrize("has_it", [True, False])
def test_an_old_gpu_is_told_from_a_new_one(has_it: bool) -> None:
    with (
        mock.patch("torch.cuda.is_bf16_supported", return_value=has_it),
        mock.patch("torch.cuda.get_device_name", return_value="Tesla V100"),
    ):
        check_autocast(torch.float16, GPU)
        if has_it:
            check_autocast(torch.bfloat16, GPU)
            return
        with pytest.raises(ArgumentsError, match=r"Tesla V100 has no bfloat16; train in float16"):
            check_autocast(torch.bfloat16, GPU)


@pytest.mark.parametrize("written", ["bf16", "BF16", "bfloat16", "torch.bfloat16", torch.bfloat16])
def test_types_are_read_as_people_write_them(written: object) -> None:
    assert read_type(written) == "bfloat16"
    assert (read_type("fp16"), read_type("half"), read_type("fp32")) == (
        "float16",
        "float16",
        "float32",
    )
    assert read_type("int8") == "int8" and read_type(3) == 3
