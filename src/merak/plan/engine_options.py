"""Options of an engine: those of the user, and those of the training loop around it."""

from __future__ import annotations

from dataclasses import dataclass

from merak.graph.ir.torch_compiler import Compilation
from merak.graph.program.program import Rewrite
from merak.graph.tensor_parallel.features import Features, parse_features
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.optimizer_memory import OptimizerFactory
from merak.plan.options import ParallelOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions(ParallelOptions):
    """Options of an engine: those that users choose, and what the loop around it knows.

    Args:
        num_microbatches: microbatches per step of one replica, as planned for.
        seed: the job's seed, for initial weights and dropout.
        device_profile: speeds that estimated times rest on; None measures those of the device.
        recorded_steps: number of past steps that are recorded, for `Engine.recorded_steps`.
        optimizer: makes the optimizer, for the forecast of its state; None forecasts none.
        trains: whether the model is laid out for training, with a loss; else for evaluation.
        observer: rewrites segments to observe tensors as they run, such as
            `graph.segment.observe.Observer`; None does not.
        compilation: how `torch.compile` compiles the operators of segments; None does not.
        can_replan: whether activations may be chosen anew after memory ran out inside a step.
        recomputes_whole: whether a recomputation runs all of a segment again, as of other
            frameworks that are priced; Merak's leaves out what only later segments read.
    """

    num_microbatches: int = 1
    seed: int = 42
    device_profile: DeviceProfile | None = None
    recorded_steps: int = 4
    optimizer: OptimizerFactory | None = None
    trains: bool = True
    observer: Rewrite | None = None
    compilation: Compilation | None = None
    can_replan: bool = True
    recomputes_whole: bool = False

    @property
    def features(self) -> Features | None:
        """Tensor parallel attributes that override what is derived from the graph.

        Raises:
            ShardError: an attribute of `feature_dict` is none.
        """
        return None if self.feature_dict is None else parse_features(self.feature_dict)
