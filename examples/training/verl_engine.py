"""An engine of verl's that trains with Merak: `strategy="merak"` of a language model.

Merak lays the actor out and trains it, verl does everything else: rollouts, rewards, advantages,
its losses. Written for verl 0.9.1, whose interface of engines changes between releases.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineConfig
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

import merak
from examples.training.policy import PolicyTraining, Sequences


@dataclass
class MerakEngineConfig(EngineConfig):
    """Layout of an engine; `micro_batch_size_per_gpu` is the pipeline's microbatch.

    Args:
        tp: tensor parallel degree.
        pp: pipeline parallel degree; the other ranks are replicas.
        device: of this rank; None for the GPU of its number, or the CPU.
        num_microbatches: of a batch that the layout is planned for; others may have other numbers.
        pad_to: sequences are padded to a multiple of so many tokens; each length is traced once.
        options: further ones of `merak.parallelize`, such as `zero` or `schedule`.
    """

    strategy: str = "merak"
    tp: int = 1
    pp: int = 1
    device: str | None = None
    num_microbatches: int = 4
    pad_to: int = 128
    options: dict[str, Any] = field(default_factory=dict)


@EngineRegistry.register(model_type="language_model", backend="merak", device=["cuda", "cpu"])
class MerakEngine(BaseEngine):
    """verl's engine over `merak.parallelize`.

    Args:
        model_config: `local_path` and `hf_config` of a causal language model.
        engine_config: the layout.
        optimizer_config: of AdamW and its learning rate.
        checkpoint_config: of verl's checkpoints; Merak's hold everything.
    """

    def __init__(
        self,
        model_config: Any,
        engine_config: MerakEngineConfig,
        optimizer_config: Any,
        checkpoint_config: Any = None,
    ) -> None:
        super().__init__()
        _refuse(model_config, engine_config)
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        tp, pp = engine_config.tp, engine_config.pp
        dp = int(os.environ.get("WORLD_SIZE", "1")) // (tp * pp)
        self.mesh = merak.init(dp, tp, pp, device=engine_config.device)
        self._replicas = _replicas(self.mesh)

    def initialize(self) -> None:
        """Lay out the model, with optimizer and schedule of the learning rate."""
        config, optimizer = self.engine_config, self.optimizer_config
        with merak.empty_weights():  # each rank reads its own part of the files
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self.model_config.local_path, dtype=torch.float32, attn_implementation="sdpa"
            )
        samples = config.micro_batch_size_per_gpu * config.num_microbatches
        ids = torch.nested.nested_tensor(
            [torch.zeros(config.pad_to, dtype=torch.long)] * samples, layout=torch.jagged
        )
        example = Sequences(ids, torch.ones(samples), config.micro_batch_size_per_gpu)
        adam = partial(
            torch.optim.AdamW,
            lr=optimizer.lr,
            betas=optimizer.betas,
            weight_decay=optimizer.weight_decay,
        )
        autocast = getattr(torch, config.dtype)
        self.training = PolicyTraining(
            model,
            adam,
            example,
            config.pad_to,
            autocast=None if autocast is torch.float32 else autocast,
            nan_policy="ignore",  # `optimizer_step` leaves such steps out
            **config.options,
        )
        if self.training.parallel.engine.holds_last_stage != self._has_outputs():
            raise ValueError(
                f"{config.options} puts the last stage on another rank than the pipeline's last, "
                "where verl reads outputs; use a schedule such as '1f1b'."
            )
        total = optimizer.total_training_steps
        warmup = max(optimizer.lr_warmup_steps or 0, 0)
        self.lr_scheduler = transformers.get_scheduler(
            "constant_with_warmup",
            self.training.optimizer,
            warmup or int(optimizer.lr_warmup_steps_ratio * max(total, 0)),
        )

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Forward of a batch, and backward unless `forward_only`, over the whole pipeline.

        The loss function runs on the ranks of the last stage, on values: verl's, or any other.
        """
        data = data.to(self.mesh.device)
        tokens = data["loss_mask"].sum()
        if self._replicas is not None:
            dist.all_reduce(tokens, group=self._replicas)
        tu.assign_non_tensor(data, batch_num_tokens=tokens.item(), dp_size=self.mesh.dp)
        if tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
            raise ValueError("use_dynamic_bsz=True; set False: Merak's microbatches are equal.")
        parts, indices = prepare_micro_batches(data, dp_group=self._replicas)

        def loss(outputs: dict[str, torch.Tensor], number: int) -> tuple[torch.Tensor, Any]:
            part = parts[number]
            if not tu.get_non_tensor_data(part, "calculate_entropy", False):
                outputs = {"log_probs": outputs["log_probs"]}
            group = self.get_data_parallel_group()
            return loss_function(model_output=outputs, data=part, dp_group=group)

        sequences = Sequences(data["input_ids"], _temperature(data), len(parts[0]))
        found = self.training.run(sequences, loss_function and loss, trains=not forward_only)
        kept = [
            {"loss": value, "metrics": rest, "model_output": outputs if forward_only else {}}
            for value, rest, outputs in found
        ]
        return postprocess_batch_func(kept, indices, data)

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients, which each backward does as well."""
        self.training.parallel.engine.optimizer_params.clear_gradients()

    def optimizer_step(self) -> float:
        """Clip and step, unless a gradient is not finite; returns the norm of all ranks' before."""
        return self.training.step(self.optimizer_config.clip_grad)

    def lr_scheduler_step(self) -> float:
        """Advance the learning rate's schedule, and return the new rate."""
        self.lr_scheduler.step()
        return float(self.lr_scheduler.get_last_lr()[0])

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Whole weights by Hugging Face name, one after another, on all ranks; no adapter."""
        return self.training.weights(), None

    @contextmanager
    def train_mode(self, **_: Any) -> Iterator[None]:
        """Context of `train_batch`: a step trains, whatever mode the model is in."""
        yield from self._in_mode("train")

    @contextmanager
    def eval_mode(self, **_: Any) -> Iterator[None]:
        """Context of `infer_batch`."""
        yield from self._in_mode("eval")

    def _in_mode(self, mode: str) -> Iterator[None]:
        self.mode = mode
        try:
            yield
        finally:
            self.mode = None

    @property
    def is_param_offload_enabled(self) -> bool:
        """Never: weights stay on their devices."""
        return False

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Never by verl; `options={"offload_optimizer": "cpu"}` keeps states in host memory."""
        return False

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Do nothing where this is the device, or nothing is to move."""
        moves = torch.device(device).type != self.mesh.device.type
        if moves and (model or optimizer or grad):
            raise ValueError(f"the model stays on {self.mesh.device}; leave param_offload out.")

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Save weights, optimizer and schedule into a folder that all ranks see.

        A newer one of `max_ckpt_to_keep` replaces the oldest that this engine has saved.
        """
        if hdfs_path is not None:
            raise ValueError(f"{hdfs_path=}: copy {local_path} there, it is a folder of files.")
        values = {"lr_scheduler": _plain(self.lr_scheduler.state_dict()), "step": global_step}
        self.training.parallel.save_checkpoint(local_path, values)
        saved = self._saved = [*getattr(self, "_saved", []), local_path]
        if max_ckpt_to_keep and len(saved) > max_ckpt_to_keep:
            oldest = saved.pop(0)
            if self.mesh.rank == 0:
                shutil.rmtree(oldest, ignore_errors=True)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Load a checkpoint, of any layout; None loads nothing."""
        if local_path is None:
            return
        values = self.training.parallel.load_checkpoint(local_path)
        self.lr_scheduler.load_state_dict(dict(values["lr_scheduler"]))
        if del_local_after_load:
            if dist.is_initialized():
                dist.barrier()  # all ranks have read it
            if self.mesh.rank == 0:
                shutil.rmtree(Path(local_path), ignore_errors=True)

    def get_data_parallel_rank(self) -> int:
        """Which replica this rank is of."""
        return self.mesh.dp_rank

    def get_data_parallel_size(self) -> int:
        """How many replicas there are."""
        return self.mesh.dp

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The ranks with the same part of the model."""
        return self._replicas

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether verl takes this rank's outputs: of the last stage, one of its tp ranks."""
        return self._has_outputs() and self.mesh.tp_rank == 0

    def _has_outputs(self) -> bool:
        return self.mesh.pp_rank == self.mesh.pp - 1


def _refuse(model_config: Any, config: MerakEngineConfig) -> None:
    """Refuse what this engine does not do.

    Raises:
        ValueError: an option asks for it.
    """
    if getattr(model_config, "lora_rank", 0):
        raise ValueError("lora_rank > 0; this engine streams whole models, set 0.")
    if config.param_offload or config.optimizer_offload:
        raise ValueError("param_offload or optimizer_offload; set False, and use `options`.")
    if config.micro_batch_size_per_gpu is None or config.use_dynamic_bsz:
        raise ValueError("set use_dynamic_bsz=False and micro_batch_size_per_gpu.")


def _replicas(mesh: Any) -> dist.ProcessGroup | None:
    """The group of a rank's data parallel peers, of one rank where there is one replica."""
    if not dist.is_initialized():
        return None
    if (own := mesh.group("dp")) is not None:
        return own
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[mesh.rank]


def _temperature(data: TensorDict) -> torch.Tensor:
    """The temperature of each sample."""
    given = tu.get(data, "temperature", 1.0)
    if isinstance(given, torch.Tensor):
        return given
    return torch.full((len(data),), float(given), device=data["input_ids"].device)


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a schedule's state."""
    return {name: value for name, value in values.items() if not name.startswith("_lr_lambda")}
