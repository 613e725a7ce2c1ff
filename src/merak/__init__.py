"""Merak: train an unmodified Hugging Face or PyTorch model on many devices."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from merak import sentence_transformers as sentence_transformers
    from merak import trl as trl
    from merak.arguments import MerakArguments, MerakSeq2SeqArguments, arguments_for
    from merak.core.errors import MerakError
    from merak.core.mesh import current_mesh
    from merak.core.start.init import init
    from merak.engine.inference.callable_model import callable_model
    from merak.engine.optimizer.one_bit import OneBitAdam, OneBitLamb
    from merak.engine.parameters.averages import averaged_parameters
    from merak.engine.parameters.gathered import gathered_parameters, stream_weights
    from merak.engine.parameters.teacher import average_teacher
    from merak.graph.tensor_parallel.features import Column, Replicate, Row, Vocabulary
    from merak.graph.trace.calls.eager_loss import eager_loss
    from merak.graph.weights.empty_weights import empty_weights
    from merak.parallel import ParallelModel, parallelize
    from merak.trainer import MerakSeq2SeqTrainer, MerakTrainer
    from merak.trainer.subclass.teacher_average import TeacherAverage

    __version__: str

_HOMES = {
    "Column": "merak.graph.tensor_parallel.features",
    "MerakArguments": "merak.arguments",
    "MerakError": "merak.core.errors",
    "MerakSeq2SeqArguments": "merak.arguments",
    "MerakSeq2SeqTrainer": "merak.trainer",
    "MerakTrainer": "merak.trainer",
    "OneBitAdam": "merak.engine.optimizer.one_bit",
    "OneBitLamb": "merak.engine.optimizer.one_bit",
    "ParallelModel": "merak.parallel",
    "Replicate": "merak.graph.tensor_parallel.features",
    "Row": "merak.graph.tensor_parallel.features",
    "TeacherAverage": "merak.trainer.subclass.teacher_average",
    "Vocabulary": "merak.graph.tensor_parallel.features",
    "arguments_for": "merak.arguments",
    "average_teacher": "merak.engine.parameters.teacher",
    "averaged_parameters": "merak.engine.parameters.averages",
    "callable_model": "merak.engine.inference.callable_model",
    "current_mesh": "merak.core.mesh",
    "gathered_parameters": "merak.engine.parameters.gathered",
    "eager_loss": "merak.graph.trace.calls.eager_loss",
    "empty_weights": "merak.graph.weights.empty_weights",
    "init": "merak.core.start.init",
    "parallelize": "merak.parallel",
    "stream_weights": "merak.engine.parameters.gathered",
}

_PACKAGES = ("sentence_transformers", "trl")
"""Packages with trainers of other libraries', which `import merak` does not import."""

__all__ = [
    "Column",
    "MerakArguments",
    "MerakError",
    "MerakSeq2SeqArguments",
    "MerakSeq2SeqTrainer",
    "MerakTrainer",
    "OneBitAdam",
    "OneBitLamb",
    "ParallelModel",
    "Replicate",
    "Row",
    "TeacherAverage",
    "Vocabulary",
    "arguments_for",
    "average_teacher",
    "averaged_parameters",
    "callable_model",
    "current_mesh",
    "eager_loss",
    "empty_weights",
    "gathered_parameters",
    "init",
    "parallelize",
    "stream_weights",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: transformers' trainer takes seconds to load."""
    if name == "__version__":
        from merak.core.packages import installed_version

        return installed_version("merak-train")
    if name in _PACKAGES:
        return import_module(f"merak.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'merak' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
