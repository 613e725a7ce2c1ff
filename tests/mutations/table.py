"""Mistakes that other frameworks have made, each in a function of Merak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.mutations.mutation import Mutation

Function = Callable[..., Any]


def _scaled_twice(right: Function) -> Function:
    return lambda step, number: right(step, number) / len(step._microbatches)


def _norm_weight_not_reduced(right: Function) -> Function:
    def wrong(tensor: Any, axis: str) -> Any:
        is_norm = tensor.dim() == 1 and tensor.is_leaf and tensor.requires_grad
        return tensor if is_norm else right(tensor, axis)

    return wrong


def _rounded_at_each_rank(right: Function) -> Function:
    from merak.ops.collectives import _all_reduce

    return _all_reduce


def _reader_counted_twice(right: Function) -> Function:
    def wrong(chain: Any, own: Any, before: Any) -> Any:
        total = right(chain, own, before)
        return total if own is None or before is None else total + own

    return wrong


def _norm_of_one_stage(right: Function) -> Function:
    return lambda gradients, order, group, device: right(gradients, order, None, device)


def _side_gradient_twice(right: Function) -> Function:
    """What a later stage gives of values beside the widest, such as routers' logits, doubled."""

    def wrong(step: Any, payload: Any, producer: int, number: int) -> Any:
        values = right(step, payload, producer, number)
        if payload.name != "GRADIENT" or len(values) < 2:
            return values
        widest = max(values, key=lambda name: values[name].numel())
        return {name: v if name == widest else 2 * v for name, v in values.items()}

    return wrong


def _last_microbatch_alone(right: Function) -> Function:
    def wrong(step: Any, action: Any, segment_done: Any) -> None:
        for parameter in step._state.parameters.values():
            parameter.grad = None
        right(step, action, segment_done)

    return wrong


def _summand_whole(right: Function) -> Function:
    return lambda tensor, axis: tensor


def _own_tokens_only(right: Function) -> Function:
    """The number of this rank's own tokens, times that of ranks."""
    from merak.ops.collectives import axis_degree

    def wrong(target: Any, classes: int, weight: Any, ignored: int, axis: str) -> Any:
        return (target != ignored).sum().float() * axis_degree(axis)

    return wrong


def _first_dims(right: Function) -> Function:
    return lambda num_dims: tuple(range(num_dims))


def _first_rank(right: Function) -> Function:
    return lambda axis: 0


def _keyed_by_rank(right: Function) -> Function:
    import os

    return lambda device, *key: right(device, *key, os.environ.get("RANK", "0"))


def _rows_not_taken(right: Function) -> Function:
    return lambda flat, bucket, degree, index: None


def _from_the_start(right: Function) -> Function:
    return lambda loader, num_batches=0: loader


MULTIRANK, UNIT = "tests/multirank", "tests/unit"

_ALL = (
    Mutation(
        "gradients_scaled_twice",
        "a pipeline's gradients are divided by the number of microbatches twice",
        "merak.engine.step.training_step:TrainingStep._update_factor",
        _scaled_twice,
        (f"{MULTIRANK}/test_parallelize.py::test_a_loop_of_ones_own_equals_one_process[layout1-loss]",),
        "tied-weights",
    ),
    Mutation(
        "norm_gradient_not_reduced",
        "a norm of queries and keys keeps the gradient of its own heads",
        "merak.ops.collectives:copy_to",
        _norm_weight_not_reduced,
        (f"{MULTIRANK}/test_check_of_parts.py::test_it_trains_as_in_one_process[norms-of-heads]",),
        "norms-of-heads",
    ),
    Mutation(
        "norm_gradient_rounded",
        "gradients of norms and biases in bfloat16 are rounded at each rank of their sum",
        "merak.ops.collectives:_sum_of_copies",
        _rounded_at_each_rank,
        (f"{UNIT}/benchmarks/test_low_precision.py::test_ranks_are_as_exact_as_one[gpt2-weights]",),
        else_found_by="`python -m benchmarks.low_precision`",
    ),
    Mutation(
        "tied_weight_counted_twice",
        "a tied weight's gradient holds one of its readers twice",
        "merak.engine.comm.tied_gradients:Chain._sum",
        _reader_counted_twice,
        (f"{MULTIRANK}/test_settled.py::test_as_in_one_process[layout0-gpipe]",),
        "tied-weights",
    ),
    Mutation(
        "norm_of_one_stage",
        "gradients are clipped by the norm of one stage",
        "merak.engine.comm.gradient_norm:pipeline_norm",
        _norm_of_one_stage,
        (f"{MULTIRANK}/test_schedules.py::test_recomputation_gives_the_gradients_of_one_process[full]",),
        else_found_by="the logged `grad_norm` beside that of one process",
    ),
    Mutation(
        "auxiliary_loss_counted_twice",
        "routers of earlier stages get the gradient of their auxiliary loss twice",
        "merak.engine.step.schedule_run:ScheduleRun.taken",
        _side_gradient_twice,
        (f"{MULTIRANK}/test_check_of_parts.py::test_it_trains_as_in_one_process[router-loss]",),
        "router-loss",
    ),
    Mutation(
        "last_microbatch_alone",
        "gradients are those of the last microbatch",
        "merak.engine.step.training_step:TrainingStep._run_backward",
        _last_microbatch_alone,
        (f"{MULTIRANK}/test_parallelize.py::test_a_loop_of_ones_own_equals_one_process[layout1-loss]",),
        "tied-weights",
    ),
    Mutation(
        "bias_added_on_every_rank",
        "every rank adds the whole bias of a row-parallel layer or an expert to its summand",
        "merak.ops.collectives:replicate_to_partial",
        _summand_whole,
        (f"{MULTIRANK}/test_tensor_parallel.py::test_ranks_equal_one_process[2-0.0-gpt2-sdpa]",),
        "row-parallel-biases",
    ),
    Mutation(
        "mean_of_means",
        "a mean over the tokens of all ranks is that of every rank's own mean",
        "merak.ops.context_parallel:_weight_of",
        _own_tokens_only,
        (f"{UNIT}/graph/context_parallel/test_parity.py::test_other_models_equal_one_process[mixtral-sdpa-True]",),
        "tokens-of-ranks",
    ),
    Mutation(
        "mean_over_the_wrong_axis",
        "a norm whose last dims are sharded normalises the first ones",
        "merak.ops.sharded_statistics:_last",
        _first_dims,
        (f"{MULTIRANK}/test_tensor_parallel.py::test_statistics_over_a_split_dim[2]",),
        else_found_by="`merak check` of a model with norms of sharded dims",
    ),
    Mutation(
        "dropout_equal_on_ranks",
        "every rank drops what rank 0 drops of its own heads",
        "merak.ops.sharded_dropout:axis_rank",
        _first_rank,
        (f"{MULTIRANK}/test_tensor_parallel.py::test_ranks_equal_one_process[2-0.2-llama-eager]",),
        else_found_by="losses with dropout beside those with tp=1, which are the same",
    ),
    Mutation(
        "dropout_differs_on_ranks",
        "ranks of one group drop other elements of a value that all of them hold",
        "merak.core.random:set_random_state",
        _keyed_by_rank,
        (f"{MULTIRANK}/test_strided_draws.py::test_draws_over_strided_values_do_not_depend_on_the_layout[degrees0-options0]",),
        else_found_by="losses with dropout beside those with tp=1, which are the same",
    ),
    Mutation(
        "stale_parameter_after_a_gather",
        "rows that another replica's optimizer has stepped stay as they were",
        "merak.engine.zero.param_all_gather:unpack",
        _rows_not_taken,
        (f"{MULTIRANK}/test_zero.py::test_shared_steps_equal_whole_ones_in_half_the_bytes[layout0-1f1b]",),
        else_found_by="losses with zero=1 beside those with zero=0",
    ),
    Mutation(
        "resumed_data_repeated",
        "a resumed job reads its epoch from the start",
        "transformers.trainer:skip_first_batches",
        _from_the_start,
        (f"{MULTIRANK}/test_resume.py::test_a_resumed_job_equals_the_one_that_went_on[layout0-setup0]",),
        else_found_by="a job that is stopped and resumed beside one that goes on",
    ),
)  # fmt: skip

MUTATIONS = {mutation.name: mutation for mutation in _ALL}
"""By name."""
