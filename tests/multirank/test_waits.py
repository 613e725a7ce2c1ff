"""What a training step reads from the device, where the host waits for a GPU: at most once."""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from merak.core.start import connect
from merak.engine.comm import replica_levels
from tests.multirank.ranks import RankPool
from tests.tiers import slow

_READS = {
    *("item", "tolist", "__bool__", "__float__", "__int__", "__index__", "cpu", "numpy"),
    *("nonzero", "is_nonzero", "masked_select", "unique", "allclose", "equal"),
}

ON_CPUS_ALONE = (
    "graph/program/index_ranges.py", "engine/optimizer/connection.py", "data/signature.py",
)  # fmt: skip
"""Files that read on a CPU only: indices, steps that optimizers count, masks of a batch there."""

_OURS = "/src/merak/"


class Waits(TorchFunctionMode):
    """Counts, by the file of Merak that asks for it, what would make the host wait for a GPU.

    Here all tensors are on the CPU. Those that would be there beside a GPU, too, are what `cpu()`
    gives, what is made of numbers without a device or with `device="cpu"`, and what is computed of
    such tensors alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        tensors = [a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        on_host = [hasattr(tensor, "is_on_host") for tensor in tensors]
        if _waits(name, args, kwargs, on_host):
            frames = [f.filename for f in traceback.extract_stack() if _OURS in f.filename]
            file = frames[-1].split(_OURS)[1] if frames else ""
            if frames and file not in ON_CPUS_ALONE:
                self.found[file, name] += 1
        result = func(*args, **kwargs)
        if name == "cpu" or _goes_to_host(args, kwargs, on_host):
            for one in pytree.tree_leaves(result):
                if isinstance(one, torch.Tensor) and (
                    name == "cpu" or all(one is not t for t in tensors)
                ):
                    one.is_on_host = True
        return result


def _goes_to_host(args: Any, kwargs: Any, on_host: list[bool]) -> bool:
    """Whether a result is on the host although there is a GPU."""
    if any(isinstance(a, torch.device) for a in (*args, kwargs.get("device"))):
        return False
    return all(on_host) and (bool(on_host) or kwargs.get("device") in (None, "cpu"))


def _waits(name: str, args: Any, kwargs: Any, on_host: list[bool]) -> bool:
    if not on_host:
        return False
    if name == "to":  # from the host's memory, which is not pinned
        goes = any(isinstance(a, torch.device) for a in args)
        return on_host[0] and goes and not kwargs.get("non_blocking")
    if all(on_host):
        return False
    if name in _READS:
        return True
    if name in ("__getitem__", "__setitem__"):
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(
            isinstance(one, list) or (isinstance(one, torch.Tensor) and one.dtype == torch.bool)
            for one in index
        )
    return name == "repeat_interleave" and kwargs.get("output_size") is None


def _llama() -> Any:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, use_cache=False,
        )
    )  # fmt: skip


def _mixtral() -> Any:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=64, num_local_experts=4, use_cache=False,
        )
    )  # fmt: skip


MODELS = {"llama": _llama, "mixtral": _mixtral}


def waits(model: str, degrees: dict[str, int], options: list[dict[str, Any]]) -> list[Any]:
    """What the third step reads, by file, with each of some options."""
    import merak

    merak.init(device="cpu", **degrees)
    ids = torch.arange(32).reshape(4, 8) % 61
    batch, found = {"input_ids": ids, "labels": ids}, []
    for own in options:
        torch.manual_seed(0)
        made = MODELS[model]()
        parallel = merak.parallelize(
            made, batch, num_microbatches=2, optimizer=torch.optim.AdamW,
            autocast=torch.bfloat16, max_grad_norm=1.0, **own,
        )  # fmt: skip
        for _ in range(2):
            parallel.step(batch)
        with Waits() as seen:
            parallel.step(batch)
        found.append(dict(seen.found))
        list(made.parameters())  # waits for what replicas still gather
    return found


IS_FINITE = {("engine/step/optimizer_step.py", "tolist"): 1}


@pytest.mark.parametrize(
    ("degrees", "options"),
    [
        ({}, [{}, {"recompute": "auto", "memory_budget": 2**30}]),
        slow({"dp": 2}, [{"zero": zero} for zero in range(4)]),
        slow({"pp": 2}, [{}, {"schedule": "zero_bubble_v"}]),
        slow({"tp": 2}, [{}, {"sub_pipelining": "on"}]),
        slow({"cp": 2}, [{}]),
    ],
)
def test_a_step_reads_whether_it_was_finite(
    pool: RankPool, degrees: dict[str, int], options: list[dict[str, Any]]
) -> None:
    for rank in pool.run(waits, max(degrees.values(), default=1), "llama", degrees, options):
        assert rank == [IS_FINITE] * len(options)


@pytest.mark.slow
def test_experts_read_their_sizes_once_a_layer_and_microbatch(pool: RankPool) -> None:
    layers, microbatches = 2, 2
    for rank in pool.run(waits, 2, "mixtral", {"dp": 2, "ep": 2}, [{}]):
        assert rank == [IS_FINITE | {("ops/expert_dispatch.py", "cpu"): layers * microbatches}]


@pytest.mark.slow
def test_experts_with_a_capacity_read_no_sizes(pool: RankPool) -> None:
    for rank in pool.run(waits, 2, "mixtral", {"dp": 2, "ep": 2}, [{"expert_capacity": 1.25}]):
        assert rank == [IS_FINITE]


def waits_by_hierarchy(zero: int) -> list[Any]:
    """What a step of replicas on two nodes reads, whose collectives run where they are counted."""
    done = replica_levels._Done()
    done.future.set_result(None)

    def start(levels: object, job: Any, *_: object) -> replica_levels.Waitable:
        job()
        return done

    with (
        mock.patch.object(connect, "host_names", lambda *_: ("a", "a", "b", "b")),
        mock.patch.object(replica_levels.Levels, "start", start),
    ):
        return waits("llama", {"dp": 4}, [{"zero": zero, "hierarchical_reductions": "on"}])


@pytest.mark.slow
def test_a_hierarchy_reads_no_more(pool: RankPool) -> None:
    for rank in pool.run(waits_by_hierarchy, 4, 2):
        assert rank == [IS_FINITE]


class _Third(transformers.TrainerCallback):
    """Watches the third step of a training, from its first microbatch to the optimizer's step."""

    def __init__(self) -> None:
        self.waits = Waits()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            self.waits.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3:
            self.waits.__exit__(None, None, None)


def trained(folder: str, degrees: dict[str, int], arguments: dict[str, Any]) -> Any:
    """What the third step of a trainer reads, by file."""
    import merak

    merak.init(device="cpu", **degrees)
    args = merak.MerakArguments(
        output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        max_steps=4, report_to=[], save_strategy="no", disable_tqdm=True, log_level="error",
        use_cpu=True, save_last_weights=False, **arguments,
    )  # fmt: skip
    ids = torch.arange(8)
    rows = [{"input_ids": (ids + n) % 61, "labels": (ids + n) % 61} for n in range(32)]
    third = _Third()
    trainer = merak.MerakTrainer(_llama(), args, train_dataset=rows, callbacks=[third])
    trainer.train()
    return dict(third.waits.found)


def test_a_step_of_the_trainer_reads_no_more(pool: RankPool, tmp_path: Path) -> None:
    for found in pool.run(trained, 2, str(tmp_path), {"pp": 2}, {}):
        assert found == IS_FINITE
