"""Merak: train an unmodified Hugging Face or PyTorch model on many devices."""

from merak.arguments import MerakArguments
from merak.core.errors import MerakError
from merak.core.mesh import current_mesh, init
from merak.graph.features import Column, Replicate, Row
from merak.graph.proxies import empty_weights
from merak.parallelize import parallelize
from merak.trainer import MerakTrainer

__all__ = [
    "Column",
    "MerakArguments",
    "MerakError",
    "MerakTrainer",
    "Replicate",
    "Row",
    "current_mesh",
    "empty_weights",
    "init",
    "parallelize",
]
