"""Rounding of bfloat16 under tensor parallelism: gradients beside float32's and one rank's.

    python -m benchmarks.low_precision [llama gpt2] [--hidden 4096] [--tokens 16384] [--tp 4 8]

A model of few layers makes one loss and its gradients in float32, then in bfloat16 on one rank, and
on several ranks with and without sequence parallelism, which run in turns in this process: shards,
collectives and their adjoints are those of a job. A number is the norm of the difference to
float32, of all layers' parameters of a name together, in percent of float32's. Weights are the same
in all of them, rounded to bfloat16 before. Kernels that sum do so in float32 and round once, as on
GPUs; reductions round after each rank, as rings do.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.tools import report
from merak.core.shards import join
from merak.core.tensor_meta import TensorMeta
from merak.graph.segment.build import GraphSource, build_graph
from merak.graph.tensor_parallel.apply import tensor_parallel
from tests.ranks_in_turns import RanksInTurns
from tests.unit.graph import tensor_parallel_cases as cases

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Precision:
    """What bfloat16 is used for.

    Args:
        weights: their type.
        autocast: the type of `torch.autocast`, or None.
    """

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None


FLOAT32 = Precision()
PRECISIONS = {
    "weights": Precision(weights=torch.bfloat16),
    "autocast": Precision(autocast=torch.bfloat16),
}


@dataclass(frozen=True, slots=True)
class Job:
    """A model and its batch.

    Args:
        family: llama (RMS norms, grouped heads) or gpt2 (layer norms, biases, a tied head).
        hidden: the width; 4096 is that of Llama 8B and of GPT-3 6.7B.
        layers: how many.
        tokens: of the batch.
        length: of a sequence; divides `tokens`.
        vocabulary: its size.
    """

    family: str
    hidden: int
    layers: int
    tokens: int
    length: int
    vocabulary: int

    def model(self) -> torch.nn.Module:
        """The model with weights of float32 that bfloat16 has as well, norms and biases too."""
        torch.manual_seed(0)
        model = _FAMILIES[self.family](self)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.05)
                parameter.copy_(parameter.bfloat16())
        return model.train()

    def columns(self) -> Tensors:
        """Random tokens, each of which is to foretell the next one."""
        draws = torch.Generator().manual_seed(1)
        shape = (self.tokens // self.length, self.length)
        ids = torch.randint(self.vocabulary, shape, generator=draws)
        return {"input_ids": ids, "labels": ids.clone()}


def _llama(job: Job) -> torch.nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=job.hidden, num_hidden_layers=job.layers, vocab_size=job.vocabulary,
            num_attention_heads=job.hidden // 128, num_key_value_heads=8, use_cache=False,
            intermediate_size=7 * job.hidden // 2, max_position_embeddings=job.length,
        )
    )  # fmt: skip


def _gpt2(job: Job) -> torch.nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=job.hidden, n_layer=job.layers, n_head=job.hidden // 128, use_cache=False,
            vocab_size=job.vocabulary, n_positions=job.length, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip


_FAMILIES: dict[str, Callable[[Job], torch.nn.Module]] = {"llama": _llama, "gpt2": _gpt2}


class _AsOnGpus(TorchDispatchMode):
    """Kernels that sum over many elements take float32 and round once, as on GPUs.

    Those of CPUs are slow in bfloat16, or round each sum on the way.
    """

    _SUM = frozenset(
        {
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
            torch.ops.aten.bmm.default,
            torch.ops.aten.embedding_dense_backward.default,
            torch.ops.aten.native_layer_norm_backward.default,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        }
    )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        if func not in self._SUM or args[0].dtype is not torch.bfloat16:
            return func(*args, **(kwargs or {}))
        wide = tree_map_only(torch.Tensor, _widened, args)
        made = func(*wide, **(kwargs or {}))
        return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, made)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype is torch.bfloat16 else tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What a forward and backward make: the loss, what the head reads, and gradients, by name."""

    values: Mapping[str, torch.Tensor]

    def errors(self, truth: Step) -> dict[str, float]:
        """Norms of differences to another step over its norms, of all layers together."""
        norms: dict[str, list[tuple[float, float]]] = {}
        for name, expected in truth.values.items():
            pair = (_norm(self.values[name].float() - expected), _norm(expected))
            norms.setdefault(re.sub(r"\.\d+\.", ".*.", name), []).append(pair)
        pairs = {name: zip(*of_layers, strict=True) for name, of_layers in norms.items()}
        return {name: math.hypot(*off) / math.hypot(*whole) for name, (off, whole) in pairs.items()}


def _norm(tensor: torch.Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float32).item()


class Trainer:
    """A job in one precision, traced once.

    Args:
        job: the model and its batch.
        precision: of weights and operators.
    """

    def __init__(self, job: Job, precision: Precision) -> None:
        model, self._columns = job.model(), job.columns()
        for parameter in model.parameters():  # not rotary tables, as `from_pretrained` has it
            parameter.data = parameter.data.to(precision.weights)
        metas = {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in self._columns.items()}
        source = GraphSource(model, autocast=precision.autocast)
        self._graph = build_graph(source, metas, training=True)
        self._weights = cases.weights(model)
        self._buffers = cases.buffers(model, self._graph)

    def step(self, degree: int = 1, sequence: bool = False) -> Step:
        """A forward and backward.

        Args:
            degree: number of tensor parallel ranks.
            sequence: whether they shard the sequence outside of products as well.
        """
        split, shards = self._graph, {}
        if degree > 1:
            chosen = tensor_parallel(self._graph, None, degree).weights
            split, shards = cases.shard_model(self._graph, chosen, degree, sequence=sequence)
        shares = [cases.local(self._weights, shards, rank) for rank in range(degree)]
        (read,) = split.segments[-1].inputs

        def train(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            others = {n: t.clone() for n, t in {**self._buffers, **self._columns}.items()}
            with _AsOnGpus():
                values = cases.run_segments(split, shares[rank], others)
                values[split.loss].backward()
            return values[split.loss].detach(), values[read].detach()

        found = RanksInTurns(degree).run(train)
        values = {
            "loss": found[0][0],
            "what the head reads": _whole(
                [own for _, own in found], self._graph.values[read].shape
            ),
        }
        for name in self._weights:
            own = [share[name].grad for share in shares]
            values[name] = join(own, shards[name]) if name in shards else own[0]
        return Step(values)


def _whole(own: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
    """A value that every rank has, or of which each has a shard of the sequence."""
    split = [dim for dim, n in enumerate(shape) if own[0].shape[dim] != n]
    return torch.cat(tuple(own), split[0]) if split else own[0]


def rows(
    job: Job, precision: Precision, degrees: Sequence[int], truth: Step
) -> list[dict[str, str]]:
    """A line for each value: its error on one rank, and on several, in percent of float32's.

    Args:
        job: the model and its batch.
        precision: of weights and operators.
        degrees: numbers of ranks.
        truth: the step in float32.
    """
    trainer = Trainer(job, precision)
    one = trainer.step()
    errors, apart = {"one rank": one.errors(truth)}, list[dict[str, float]]()
    for degree, sequence in itertools.product(degrees, (False, True)):
        step = trainer.step(degree, sequence)
        errors[f"tp={degree}{', sp' if sequence else ''}"] = step.errors(truth)
        apart.append(step.errors(one))
    return [
        {"of": name}
        | {layout: f"{100 * found[name]:.2f}" for layout, found in errors.items()}
        | {"most to one rank": f"{100 * max(found[name] for found in apart):.2f}"}
        for name in errors["one rank"]
    ]


def main() -> None:
    """Print the tables."""
    parser = report.parser(__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(_FAMILIES))
    parser.add_argument("--hidden", type=int, default=4096, help="a multiple of 1024")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--tp", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    sizes = (args.hidden, args.layers, args.tokens, args.length, args.vocabulary)
    tables = {}
    for family in args.families or _FAMILIES:
        job = Job(family, *sizes)
        truth = Trainer(job, FLOAT32).step()
        for name in args.precisions:
            title = f"{family}, bfloat16 {name}: error in % of float32"
            tables[title] = rows(job, PRECISIONS[name], args.tp, truth)
    report.show(tables, args.json)


if __name__ == "__main__":
    main()
