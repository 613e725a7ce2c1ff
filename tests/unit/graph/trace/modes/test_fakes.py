"""What a trace puts in the place of the real thing."""

from __future__ import annotations

from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import masking_utils
from transformers.utils import import_utils

from merak.graph.trace.modes.fakes import eager_masks
from merak.graph.trace.modes.known_ones import KnownOnes


def test_no_mask_is_no_sign_of_a_trace() -> None:
    with (
        mock.patch.object(import_utils, "is_torchdynamo_compiling", lambda: True),
        FakeTensorMode() as mode,
    ):
        mask = mode.from_tensor(torch.ones(1, 2, dtype=torch.bool))
        assert masking_utils.is_tracing(None)
        with eager_masks({}, KnownOnes({})):
            assert not masking_utils.is_tracing(None)
            assert not masking_utils.is_tracing()
            assert masking_utils.is_tracing(mask)
        assert masking_utils.is_tracing(None)
