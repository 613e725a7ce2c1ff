"""What a trace warns of is said once for all layers, shapes and modes; torch's own logs never."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph

logger = logging.getLogger("somebodys.model")


class Layer(nn.Module):
    """Warns in its forward, with its number and the shape; another part of it is opaque."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear, self.branch = number, nn.Linear(8, 8), Branch()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn(f"layer {self.number} has no mask for {x.shape[0]} rows", stacklevel=1)
        logger.warning("layer %d is slow", self.number)
        logging.getLogger("torch.somewhere").error("a stack of torch's")
        self.calls = f"{x.shape[0]} rows"  # which every trace warns of, for each layer
        return x + self.branch(self.linear(x))


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        warnings.warn("a branch", stacklevel=1)
        return 2 * x if x.max() > 0.5 else x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


def test_a_warning_is_said_once_for_layers_shapes_and_modes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = GraphSource(Model())
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for rows, training in ((4, True), (6, True), (4, False)):
            columns = {"x": TensorMeta((rows, 8), torch.float32)}
            build_graph(source, columns, training=training)
    said = [str(one.message) for one in found]
    (masks,) = (one for one in said if "has no mask" in one)
    assert masks.startswith("layer 0 has no mask for 4 rows (and ")
    assert masks.endswith(" more like it)")
    assert sum("a branch" in one for one in said) == 1
    logged = [record.getMessage() for record in caplog.records]
    (slow,) = (one for one in logged if "is slow" in one)
    assert slow.startswith("layer 0 is slow (and ")
    assert not any("a stack of torch's" in one for one in logged)


def test_what_is_warned_of_before_a_failure_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Fails(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logger.warning("layer 1 is slow")
            raise ValueError("a mistake")

    with pytest.raises(Exception, match="a mistake"):
        build_graph(GraphSource(Fails()), {"x": TensorMeta((4, 8), torch.float32)}, training=True)
    assert [r.getMessage()[:15] for r in caplog.records if r.name == logger.name] == [
        "layer 1 is slow"
    ]
