"""What counts as library code where a model's own line, or the user's, is looked for."""

from __future__ import annotations

import contextlib
import json
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.models.gpt2 import modeling_gpt2
from transformers.utils import generic

import merak
from merak.core.source_lines import (
    is_installed,
    is_library,
    model_line,
    users_line,
    with_text,
)
from merak.graph.trace import trace

HERE = str(Path(__file__))
MODELS = (modeling_gpt2.__file__, HERE, "/home/me/torch/model.py", "/src/merak/graph/model.py")
LIBRARIES = (
    nn.__file__,
    trace.__file__,
    generic.__file__,
    contextlib.__file__,
    "<eval_with_key>.3",
    "<frozen runpy>",
)


@pytest.mark.parametrize("file", MODELS)
def test_a_models_code_is_no_library(file: str) -> None:
    assert not is_library(file)


@pytest.mark.parametrize("file", LIBRARIES)
def test_code_that_every_model_runs_through_is_a_library(file: str) -> None:
    assert is_library(file)


def test_only_the_users_own_files_are_not_installed() -> None:
    installed = (*LIBRARIES, merak.__file__, json.__file__, modeling_gpt2.__file__)
    assert all(map(is_installed, installed))
    assert not is_installed(HERE) and not is_installed("<stdin>")


def test_the_line_that_runs_is_the_models_own() -> None:
    found: list[str] = []

    class Noting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.ExitStack() as stack:
                stack.callback(lambda: found.append(model_line()))
            return x

    Noting()(torch.zeros(1))
    (line,) = found
    assert line.rpartition(":")[0] == HERE
    assert with_text(line) == f"{line}: `stack.callback(lambda: found.append(model_line()))`"
    assert with_text("nowhere.py:3") == "nowhere.py:3"


def test_the_users_line_is_the_innermost_that_is_not_installed() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    place = users_line(traceback.extract_tb(caught.value.__traceback__))
    assert place.rpartition(":")[0] == HERE
    assert users_line([traceback.FrameSummary(nn.__file__, 1, "forward")]) == ""
