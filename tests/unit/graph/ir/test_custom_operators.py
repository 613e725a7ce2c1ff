"""Merak's own operators: one library, one registry, and what other rooms ask it."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import merak
from merak.graph.ir.custom_operators import (
    Role,
    custom_operator,
    pack_arguments,
    role_of,
    unpack_arguments,
)
from merak.graph.trace.opaque.operator import OPAQUE_CALL, CallCost
from merak.graph.trace.passes import PASSES
from merak.graph.trace.session import MODES, REPLACEMENTS


def test_there_is_one_library_and_every_operator_of_it_is_registered() -> None:
    sources = Path(merak.__file__).parent.rglob("*.py")
    assert [s.name for s in sources if "library.Library(" in s.read_text()] == [
        "custom_operators.py"
    ]
    found = {
        name.removeprefix("merak::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("merak::")
    }
    operators = [custom_operator(getattr(torch.ops.merak, name).default) for name in found]
    assert len(operators) >= 9 and None not in operators
    assert {operator.role for operator in operators if operator is not None} == set(Role)


def test_a_node_is_asked_for_its_role() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    cost = CallCost((), saved_bytes=3, flops=4)
    call = graph.call_function(OPAQUE_CALL, ([], [x], cost.to_json()))
    assert role_of(call) is Role.OPAQUE_CALL
    assert role_of(x) is None
    assert role_of(graph.call_function(torch.ops.aten.relu.default, (x,))) is None
    assert CallCost.from_json(str(call.args[-1])) == cost


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((torch.ones(2), 3, None, "tensor"), {"p": 0.5}),
        (((2, 3), [torch.zeros(1), {"a": True}]), {"mask": torch.ones(3)}),
    ],
)
def test_arguments_come_back(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    packed = pack_arguments(args, kwargs)
    assert packed is not None
    again = unpack_arguments(*packed)
    assert str(again) == str((args, kwargs))


def test_an_object_is_no_plain_argument() -> None:
    assert pack_arguments((Enum("Kind", "A"),), {}) is None
    assert pack_arguments((object(),), {}) is None


@pytest.mark.parametrize("steps", [PASSES, REPLACEMENTS, MODES])
def test_every_pass_and_mode_has_a_reason_of_its_own(steps: Any) -> None:
    reasons = [reason for _, reason in steps]
    assert all(len(reason.split()) > 3 for reason in reasons)
    assert len(set(reasons)) == len(reasons)
