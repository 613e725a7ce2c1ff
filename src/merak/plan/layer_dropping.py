"""Progressive layer dropping: the probability with which sublayers are kept, over steps and depth.

Source: arXiv 2010.13369 (progressive layer dropping), section 4.2: θ(t) = (1 − θ̄) exp(−γ t) + θ̄,
and each sublayer of block i of L is kept with the probability 1 − (i / L) (1 − θ(t)).
"""

from __future__ import annotations

import math


def kept(step: int, limit: float, decay: float) -> float:
    """The probability with which a sublayer of the last block is kept in a step, θ(t).

    Args:
        step: number of optimizer steps before it.
        limit: what it approaches, θ̄.
        decay: how fast, γ, per step.
    """
    return (1.0 - limit) * math.exp(-decay * step) + limit


def kept_at(depth: int, num_blocks: int, last: float) -> float:
    """The probability with which a sublayer of a block is kept.

    Args:
        depth: its number, from 1.
        num_blocks: of the stack.
        last: of a sublayer of the last block.
    """
    return 1.0 - depth / num_blocks * (1.0 - last)
