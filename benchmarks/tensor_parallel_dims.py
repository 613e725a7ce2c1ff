"""Bytes and memory of tensor parallelism in 1, 2, 2.5 and 3 dims, by formula, for one layer.

    python benchmarks/tensor_parallel_dims.py [--hidden 8192] [--tokens 8192] [--check PAGE]

A layer of attention and an MLP of four times its width, forward and backward, in 16 bits. 1 dim is
Megatron-LM's split with sequence parallelism, as Merak derives it. 2 dims are SUMMA's products on a
q × q grid (Optimus, arXiv 2104.05343), 2.5 dims that grid d times over shares of the tokens
(Tesseract, arXiv 2105.14500), 3 dims an l × l × l cube (arXiv 2105.14450). Counted is what a rank
receives; no product hides any of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools import report

PRODUCTS = ((1, 3), (1, 1), (1, 4), (4, 1))
"""Inputs and outputs of a layer's products, in times of the hidden size."""

ITEM_BYTES = 2
DEGREES = (8, 16, 64)


def one_dim(tokens: int, hidden: int, ranks: int) -> tuple[float, float]:
    """Elements that a rank receives, and elements of weights that it holds.

    Forward: two gathers of the tokens and two reduce-scatters; backward: their adjoints, and the
    gathered inputs of two products once more for the gradients of their weights.
    """
    return 10 * tokens * hidden * (1 - 1 / ranks), 12 * hidden**2 / ranks


def grids(tokens: int, hidden: int, side: int, depth: int) -> tuple[float, float]:
    """The same on `depth` grids of side × side ranks, each with a share of the tokens.

    Each of the three products (forward, and two backward) moves rows of activations and columns of
    weights along the grid; the grids add their gradients of weights up.
    """
    inputs = sum(own for own, _ in PRODUCTS) * hidden * tokens / depth
    weights = sum(one * two for one, two in PRODUCTS) * hidden**2
    moved = 3 * (inputs + weights) / side * (1 - 1 / side)
    return moved + 2 * weights / side**2 * (1 - 1 / depth), weights / side**2


def cube(tokens: int, hidden: int, side: int) -> tuple[float, float]:
    """The same on a cube: each product gathers two of its three matrices and scatters the third."""
    moved = sum(tokens * hidden * (one + two) + hidden**2 * one * two for one, two in PRODUCTS)
    weights = sum(one * two for one, two in PRODUCTS) * hidden**2
    return 3 * moved / side**2 * (1 - 1 / side), weights / side**3


def ways(tokens: int, hidden: int, ranks: int) -> Iterator[tuple[str, tuple[float, float]]]:
    """The ways that so many ranks allow, with their numbers."""
    yield "1 dim", one_dim(tokens, hidden, ranks)
    for depth in (1, 2, 4):
        side = math.isqrt(ranks // depth)
        if side > 1 and side**2 * depth == ranks and depth <= side:
            name = "2 dims" if depth == 1 else f"2.5 dims, {depth} grids"
            yield name, grids(tokens, hidden, side, depth)
    side = round(ranks ** (1 / 3))
    if side**3 == ranks:
        yield "3 dims", cube(tokens, hidden, side)


def rows(tokens: int, hidden: int) -> list[dict[str, Any]]:
    """Lines of the table."""
    found = []
    for ranks in DEGREES:
        usual, _ = one_dim(tokens, hidden, ranks)
        for name, (moved, held) in ways(tokens, hidden, ranks):
            found.append(
                {
                    "tp": ranks,
                    "way": name,
                    "received, MB": round(moved * ITEM_BYTES / 1e6),
                    "÷ 1 dim": round(moved / usual, 2),
                    "weights, MB": round(held * ITEM_BYTES / 1e6),
                }
            )
    return found


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--check", type=Path, help="page that must have these rows")
    chosen = parser.parse_args()
    title = f"A layer of {chosen.hidden:,} features, {chosen.tokens:,} tokens"
    found = {title: rows(chosen.tokens, chosen.hidden)}
    report.show(found, chosen.json)
    if chosen.check:
        report.check(found, chosen.check)


if __name__ == "__main__":
    main()
