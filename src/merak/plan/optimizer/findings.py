"""Verdict on an optimizer over a layout's tensors, for its engine and for a forecast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from merak.core.announce import announced
from merak.core.tensor_meta import TensorMeta
from merak.plan.optimizer.needs import Findings
from merak.plan.optimizer.small_tensors import JobTensor, small_tensors
from merak.plan.optimizer.trial import run_trial

_KNOWN: dict[object, Findings] = {}
"""Findings of this process, by class, options and kinds of tensors."""


def find(
    optimizer: torch.optim.Optimizer, tensors: Sequence[JobTensor], device: torch.device
) -> Findings:
    """Findings of a trial of an optimizer's class, which runs once for its options and tensors.

    Args:
        optimizer: of a job; it is left as it is.
        tensors: what it steps, as the layout cuts it.
        device: where they are.
    """
    small = small_tensors(tensors, optimizer.param_groups)
    if not small:
        return Findings()
    kinds = tuple((one.of, one.shape, _text(one.options)) for one in small)
    key = (type(optimizer), _text(optimizer.defaults), kinds, str(device))
    if key not in _KNOWN:
        with announced(f"judging {type(optimizer).__name__} on small tensors"):
            _KNOWN[key] = run_trial(optimizer, small, device)
    return _KNOWN[key]


def find_before(
    factory: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    tensors: Sequence[tuple[TensorMeta, JobTensor]],
    device: torch.device,
) -> Findings:
    """Findings of a trial of an optimizer that a job has not made yet.

    Args:
        factory: makes the optimizer.
        tensors: what it steps on a rank, of the shapes that it has there, as the layout cuts it.
        device: where they are.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        parameters = [
            nn.Parameter(torch.empty(meta.shape, dtype=meta.dtype, device=device))
            for meta, _ in tensors
        ]
    try:
        optimizer = factory(parameters)
    except Exception:  # the measurement of its memory warns of it
        return Findings()
    by_id = {id(p): one for p, (_, one) in zip(parameters, tensors, strict=True)}
    own = [
        replace(by_id[id(parameter)], group=number)
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if id(parameter) in by_id
    ]
    return find(optimizer, own, device)


def _text(options: Mapping[str, Any]) -> str:
    return repr(sorted(options.items(), key=lambda item: item[0]))
