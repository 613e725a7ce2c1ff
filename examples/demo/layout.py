"""How many ranks torchrun started, and a sensible way to use them."""

import os


def default_degrees(max_tp: int = 2) -> tuple[int, int, int]:
    """Degrees (dp, tp, pp) for the ranks there are: pp=2 first, then tp, then dp takes the rest.

    Args:
        max_tp: 1 for a model whose linears nobody has said how to split.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))
    pp = 2 if num_ranks % 2 == 0 else 1
    tp = 2 if num_ranks % 4 == 0 and max_tp > 1 else 1
    return num_ranks // (tp * pp), tp, pp
