"""Estimated throughputs of products and attention against published ones, and their properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from merak.plan.cost.data_sheets import GENERATIONS, LINKS, SHEETS
from merak.plan.cost.device import preset
from merak.plan.cost.efficiency import (
    AttentionShape,
    ProductShape,
    attention_fraction,
    product_fraction,
)
from merak.plan.cost.kernels.kernel_time import work_seconds, works_seconds
from merak.plan.cost.operators import Work

SIZES = st.integers(1, 20_000)


def product_teraflops(device, m, n, k):
    shape = ProductShape(m, n, k)
    work = Work(2.0 * (m * n + m * k + n * k), 2.0 * m * n * k, torch.bfloat16, shape=shape)
    return work.flops / work_seconds(work, device) / 1e12


@pytest.mark.parametrize(
    ("size", "published"),
    [(1536, 148), (1792, 202), (2048, 195), (2304, 244), (2560, 230), (3072, 235), (4096, 258),
     (4608, 275), (5120, 261), (8192, 291)],
)  # fmt: skip
def test_products_on_an_a100_are_those_that_nvidia_prints(size, published):
    """Read off a figure: "Mixed Precision Matrix Multiply on A100" with cuBLAS, to about 3."""
    assert product_teraflops(preset("a100"), size, size, size) == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize(
    ("name", "dtype", "published"),
    [("rtx-3090", "float16", 81.3 / 160 * 142), ("rtx-3090", "tfloat32", 42.1 / 40 * 35.6),
     ("rtx-4090", "float16", 172), ("rtx-4090", "tfloat32", 86)],
)  # fmt: skip
def test_products_on_geforce_cards_are_as_measured(name, dtype, published):
    """8,192 rows. Source: mli/transformers-benchmarks; an RTX 3090 Ti by the peaks' ratio."""
    sheet = SHEETS[name]
    shape = ProductShape(8192, 8192, 8192)
    fraction = product_fraction(shape, sheet.efficiency, sheet.multiprocessors)
    rate = fraction * sheet.efficiency.product * sheet.teraflops[dtype]
    assert rate == pytest.approx(published, rel=0.05)


PUBLISHED = {
    # (head, causal, backward): TFLOP/s of cuDNN on an H100 with 512, 1k, 2k, 4k, 8k and 16k keys
    (128, False, False): (497, 574, 617, 609, 600, 595),
    (128, True, False): (315, 410, 484, 518, 529, 539),
    (64, False, False): (335, 373, 395, 408, 412, 413),
    (64, True, False): (225, 288, 334, 363, 379, 388),
    (128, False, True): (305, 408, 465, 499, 518, 516),
    (64, False, True): (266, 348, 395, 417, 432, 433),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_attention_on_an_h100_is_that_of_cudnn(kind):
    """Source: FlashAttention-3, arXiv 2407.08608, figures 5 and 6; 16k tokens, 2,048 features."""
    sheet = SHEETS["h100-sxm"]
    head, is_causal, is_backward = kind
    for power, published in enumerate(PUBLISHED[kind]):
        shape = AttentionShape(head, 512 << power, 16384 * 2048 // head, is_causal, is_backward)
        fraction = attention_fraction(shape, sheet.efficiency, sheet.multiprocessors)
        assert fraction * sheet.teraflops["float16"] == pytest.approx(published, rel=0.1)


@given(SIZES, SIZES, SIZES, st.integers(1, 64), st.sampled_from(sorted(SHEETS)))
def test_no_product_is_faster_than_an_endless_one(m, n, k, batch, name):
    sheet = SHEETS[name]
    shape = ProductShape(m, n, k, batch)
    fraction = product_fraction(shape, sheet.efficiency, sheet.multiprocessors)
    assert 0 < fraction <= 1
    swapped = ProductShape(n, m, k, batch)
    assert fraction == product_fraction(swapped, sheet.efficiency, sheet.multiprocessors)


def test_products_lose_by_partial_tiles_and_rounds_and_little_depth():
    sheet = SHEETS["a100-80gb"]

    def fraction(m, n, k):
        return product_fraction(ProductShape(m, n, k), sheet.efficiency, 108)

    full = fraction(128 * 108, 256 * 4, 4096)
    assert full == pytest.approx(4096 / (4096 + 128))
    assert fraction(128 * 108 + 1, 256, 4096) < 0.7 * full  # another round for two tiles
    assert fraction(65, 20_000, 4096) < 0.6 * full  # half of each tile
    assert fraction(128 * 108, 1024, 128) == pytest.approx(0.5)
    # One row of tiles is cut along its depth, so a deep product fills the device all the same.
    assert fraction(128, 128, 100_000) > 0.85


def test_attention_loses_by_short_rows_and_few_of_them():
    sheet = SHEETS["a100-80gb"]
    long = AttentionShape(128, 16384, 10**6, False, False)

    def fraction(**changes):
        return attention_fraction(replace(long, **changes), sheet.efficiency, 108)

    assert 0.7 < fraction() < sheet.efficiency.attention_forward
    assert 0.55 < fraction(is_backward=True) < sheet.efficiency.attention_backward
    assert fraction(keys=512) < 0.85 * fraction()
    assert fraction(keys=512, is_causal=True) < fraction(keys=512)
    assert fraction(rows=54 * 128) == pytest.approx(fraction() / 2)
    assert fraction(head=64) < fraction()


def test_launches_are_hidden_by_long_kernels_alone():
    device = preset("h100")
    launch_s = device.efficiency.launch_s
    short, long = Work(1.0), Work(1e9)
    assert works_seconds([short] * 10, device) == pytest.approx(10 * launch_s)
    assert works_seconds([long] * 10, device) == 10 * work_seconds(long, device)
    assert works_seconds([short] * 9 + [long], device) == pytest.approx(
        sum(work_seconds(work, device) for work in [short] * 9 + [long])
    )
    measured = replace(device, efficiency=None)
    assert works_seconds([short] * 3, measured) == 3 * work_seconds(short, measured)


def test_fractions_are_fractions_and_have_sources():
    for curve_name, curve in GENERATIONS.items():
        assert curve.source
        for name in ("attention_forward", "attention_backward", "copy", "host"):
            assert 0 < getattr(curve, name) < 1
        # GeForce cards run above the clocks of their data sheets.
        assert 0 < curve.product < (1.1 if "geforce" in curve_name else 1)
        assert curve.attention_backward <= curve.attention_forward
    for link in LINKS.values():
        assert 0 < link.fraction < 1
        assert all(latency < 1 and rate < 1 for latency, rate in link.protocols)
