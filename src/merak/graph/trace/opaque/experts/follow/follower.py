"""Operators of a module that loops over experts, one after another on every expert's rows.

The module runs on tensors without values, and on a few tokens whose experts are known. So it is
known which expert's rows each of its operators takes, and from what.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from merak.graph.ir.operators import aten_family
from merak.graph.trace.opaque.experts.follow import operands, per_row, sums
from merak.graph.trace.opaque.experts.follow.state import Loop

Rule = Callable[[Loop, Any, Any, Any], Any]
"""An operator on what is followed: its result; None for an operator that it is not about."""


class Follower(Loop, TorchDispatchMode):
    """Follows what a module's operators make of tokens and weights."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and note what its result is."""
        kwargs, name = kwargs or {}, aten_family(func)
        if self.is_paused:
            return func(*args, **kwargs)
        if not any(self.meaning(value) for value in tree_leaves((args, kwargs))):
            made = func(*args, **kwargs)
            if name in _NEW and made.is_meta:
                self.blank(made, is_filled="zeros" in name)
            return made
        for rule in _RULES.get(name, ()):
            made = rule(self, func, args, kwargs)
            if made is not None:
                return made
        return per_row.per_row(self, func, args, kwargs)


_NEW = frozenset(("zeros", "zeros_like", "new_zeros", "empty", "empty_like", "new_empty"))
"""Operators whose result rows may be added to, or put into."""

_RULES: dict[str, tuple[Rule, ...]] = {
    "index": (operands.picked,),
    "index_select": (operands.picked_along,),
    "select": (operands.selected,),
    "unbind": (operands.unbound,),
    "view": (operands.viewed,),
    "_unsafe_view": (operands.viewed,),
    "unsqueeze": (operands.unsqueezed,),
    "t": (operands.flipped,),
    "transpose": (operands.flipped,),
    "permute": (operands.flipped,),
    "mm": (operands.multiplied,),
    "addmm": (operands.multiplied,),
    "add": (sums.added_to_part,),
    "add_": (sums.added_to_part,),
    "index_put": (sums.put,),
    "index_put_": (sums.put,),
    "index_add": (sums.added,),
    "index_add_": (sums.added,),
    "scatter_add": (sums.scatter_added,),
    "scatter_add_": (sums.scatter_added,),
    "cat": (sums.concatenated,),
    "detach": (sums.apart,),
    "empty_like": (per_row.noise, sums.unfilled),
    "new_empty": (per_row.noise, sums.unfilled),
    "bernoulli_": (per_row.drawn,),
    "div_": (per_row.scaled,),
    "mul": (per_row.dropped,),
    "zeros_like": (sums.zeros,),
    "new_zeros": (sums.zeros,),
}
"""What operators make of what is followed, by name; all others treat every row by itself."""
