"""The engine's options, which `MerakArguments` and `parallelize` fill in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from merak.graph.program.program import Rewrite
from merak.graph.tensor_parallel.features import Features
from merak.plan.cost.device import DeviceProfile
from merak.plan.cost.optimizer_memory import OptimizerFactory
from merak.plan.recompute_spec import Recompute


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of the engine: layout, schedule, memory and precision of a job.

    Args:
        schedule: name of the pipeline schedule.
        num_microbatches: microbatches per step of one replica, as planned for.
        seed: the job's seed, for initial weights and dropout.
        features: tensor parallel attributes that override those derived from the graph.
        segments_per_stage: the number of segments of every stage; None balances them by time.
        segment_times: a file of measured times of the segments; None estimates them.
        device_profile: the speeds that estimates rest on; None measures them.
        bucket_bytes: size of the buckets in which gradients are reduced over dp.
        exact_tied_gradients: exchange gradients of tied parameters after every microbatch, in the
            order of summation of one process; else once per step.
        sub_pipelining: "on" splits every microbatch into two sub-microbatches, so that tensor
            parallel all-reduces of one run beside the computation of the other; "off" does not;
            "auto" where it pays.
        sequence_parallel: shard the sequence over tp between the sharded matrix products;
            all-gathers and reduce-scatters replace the all-reduces.
        hang_limit_s: seconds that a rank may wait, or be in one action, before every rank reports
            its status and the job ends.
        recorded_steps: past steps whose action times `Engine.recorded_steps` holds.
        max_shapes: microbatch shapes whose programs are cached beside the planned one.
        recompute: segments that recompute their activations, as
            `merak.plan.recompute_spec.parse_recompute` reads it; None leaves it to the
            schedule.
        offload_activations: saved activations that are offloaded to host memory, as
            `merak.plan.activations.offload.parse_offload` reads it; None for none.
        host_bytes_per_s: of a rank's link to host memory, in each direction while both are used;
            None measures it where it matters.
        memory_budget_bytes: bytes that a rank may hold; None takes a GPU's memory, and no limit on
            the CPU.
        master_weights: keep float32 masters of parameters of a lower precision for the optimizer.
        float32_gradients: accumulate gradients of parameters of a lower precision in float32; else
            in their own type.
        zero: 1 shards the optimizer over dp, 2 also the gradients, 3 also the parameters, 0
            nothing.
        optimizer: makes the optimizer, for the forecast of its state; None forecasts none.
        trains: lay the model out for training, with a loss; else for evaluation.
        observer: rewrite of every segment that records values, such as
            `graph.segment.observe.Observer`; None for none.
    """

    schedule: str = "1f1b"
    num_microbatches: int = 1
    seed: int = 42
    features: Features | None = None
    segments_per_stage: tuple[int, ...] | None = None
    segment_times: Path | None = None
    device_profile: DeviceProfile | None = None
    bucket_bytes: int = 25 * 2**20
    exact_tied_gradients: bool = True
    sub_pipelining: str = "auto"
    sequence_parallel: bool = False
    hang_limit_s: float = 600.0
    recorded_steps: int = 4
    max_shapes: int = 64
    recompute: Recompute = None
    offload_activations: Recompute = None
    host_bytes_per_s: float | None = None
    memory_budget_bytes: int | None = None
    master_weights: bool = False
    float32_gradients: bool = True
    zero: int = 0
    optimizer: OptimizerFactory | None = None
    trains: bool = True
    observer: Rewrite | None = None
