"""Sharding rules where several ranks hold the same shard, as of 12 heads on 8 ranks.

The ranks fall into groups of equal size, with a shard for each group: an operator works on it as it
would with so many ranks as there are groups, on every rank of a group the same. Where shards are
summed over, or gathered, each rank of a group goes on with a share of its own. So each makes a
part of the gradient of what the group shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from merak.graph.ir.mutation import mutated_arguments
from merak.graph.ir.operators import ATTENTIONS, family
from merak.graph.tensor_parallel.placement import (
    Decision,
    Operator,
    Placement,
    ResultPlacement,
    Rule,
    Shard,
)


def decide_shared(op: Operator, rule: Rule) -> Decision:
    """Decision about an operator of which some shards are each on several ranks.

    Args:
        op: the operator.
        rule: decides where every shard is on one rank.

    Raises:
        ShardError: the rule has none, or shares of shards would be unequal.
    """
    split = op.sharded()
    least = min(placed.copies for placed in split.values())
    decision = _in_groups(op, rule, split, least)
    if least == 1 or (_is_sharded(decision.output) and not decision.sums):
        return decision
    return _in_groups(op, rule, split, 1)


def _in_groups(op: Operator, rule: Rule, split: Mapping[fx.Node, Shard], copies: int) -> Decision:
    """Decision of groups of so many ranks; operands that more of them hold are shared out."""
    assert isinstance(op.degree, int)
    degree, keys = op.degree // copies, _grouped_keys(op)
    alone: dict[fx.Node, Placement] = {}
    shares: dict[fx.Node, Placement] = {}
    for node, placed in split.items():
        is_kept = node in keys and placed.copies % copies == 0
        alone[node] = replace(placed, copies=placed.copies // copies if is_kept else 1)
        if placed.copies != copies and not is_kept:
            shares[node] = replace(placed, copies=copies)
            if math.gcd(*placed.parts) % degree:
                raise op.error("reads heads that the ranks cannot share out equally")
    if any(node in shares for node in mutated_arguments(op.node)):
        raise op.error("writes into heads of which each is on several ranks")
    groups = replace(op, placements={**op.placements, **alone}, degree=degree, copies=copies)
    decision = rule(groups)
    needs = {node: _shared(placed, copies) for node, placed in decision.needs.items()}
    return replace(decision, output=_each_shared(decision.output, copies), needs=shares | needs)


def _grouped_keys(op: Operator) -> tuple[fx.Node, ...]:
    """Keys and values of which several heads of queries read one: fewer ranks may share it."""
    if family(op.node.target) in ATTENTIONS and op.arg("enable_gqa", False):
        return op.arg("key"), op.arg("value")
    return ()


def _is_sharded(placed: ResultPlacement) -> bool:
    each = placed if isinstance(placed, tuple) else (placed,)
    return all(isinstance(one, Shard) for one in each)


def _each_shared(placed: ResultPlacement, copies: int) -> ResultPlacement:
    if isinstance(placed, tuple):
        return tuple(_shared(one, copies) for one in placed)
    return _shared(placed, copies)


def _shared(placed: Placement, copies: int) -> Placement:
    if not isinstance(placed, Shard):
        return placed
    return replace(placed, copies=placed.copies * copies)
