"""Evaluation for transformers' own loop: batches computed by all ranks, results on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from accelerate.utils import recursively_apply  # type: ignore[import-untyped]
from torch.utils.data import DataLoader

from merak.core.mesh import Mesh
from merak.data import BatchSignature, example_batch, shard_loader, without_plain
from merak.engine.engine import Engine
from merak.trainer.batches import Agreement, Batch, Council
from merak.trainer.tokens import TOKENS, TokenCounter


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What an evaluation must give.

    Args:
        only_loss: no logits or labels.
        label_names: columns that are labels.
        kept_inputs: columns to give back beside the results.
        plain: arguments that are no tensors, which every batch has beside its columns.
        seed: of the loader's random draws.
    """

    only_loss: bool
    label_names: tuple[str, ...]
    kept_inputs: tuple[str, ...]
    plain: Mapping[str, Any]
    seed: int


class Evaluation:
    """A loader whose batches have been through the model when they come out.

    The batches are those of a single process, in its order; each replica computes every dp-th, and
    several travel down the pipeline at a time.

    Args:
        engine: this rank's engine.
        council: lets ranks agree on batches and share results.
        loader: the loader of a single process.
        counter: counts label tokens, where the loss takes them.
        options: what to give.
    """

    def __init__(
        self,
        engine: Engine,
        council: Council,
        loader: DataLoader[Any],
        counter: TokenCounter,
        options: EvaluationOptions,
    ) -> None:
        self.dataset = loader.dataset
        self.end_of_dataloader = False
        self.remainder = -1
        self._engine = engine
        self._council = council
        self._loader = loader
        self._counter = counter
        self._options = options
        self._current: dict[str, Any] = {}

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks."""
        return self._council.mesh

    def __len__(self) -> int:
        """The number of batches of a single process."""
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """The inputs to give back of each batch; its results are then in `result`."""
        rounds = iter(self._rank_loader())
        while chunk := list(islice(rounds, 2 * self.mesh.pp)):
            for computed in self._compute(chunk):
                self._current = computed
                yield computed["inputs"]

    def gather(self, data: Any) -> Any:
        """What transformers' loop gathers is here already; a ragged batch has fewer samples."""
        count = self._current["samples"]
        return recursively_apply(lambda tensor: tensor[:count], data)

    def result(self, only_loss: bool, ignore_keys: Sequence[str]) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of the current batch, each None where there is none."""
        outputs: dict[str, Any] = dict(self._current["outputs"])
        loss = outputs.pop("loss", None)
        if only_loss:
            return loss, None, None
        logits = tuple(value for name, value in nest(outputs).items() if name not in ignore_keys)
        labels = tuple(self._current["labels"].values())
        return loss, _single(logits), _single(labels) if labels else None

    # ---- computing ----

    def _rank_loader(self) -> DataLoader[Any]:
        options = self._options
        sample = without_plain(example_batch(self._loader, seed=options.seed), options.plain)
        signature = self._counter.signature(sample)
        read = list(self._engine.columns(signature.columns, training=False))
        if self._engine.holds_last_stage:
            kept = (*options.label_names, *options.kept_inputs)
            read += [name for name in kept if name in sample]
        return shard_loader(
            self._loader,
            dp_degree=self.mesh.dp,
            dp_rank=self.mesh.dp_rank,
            columns=self._counter.to_read(read),
            seed=options.seed,
            plain=options.plain,
        )

    def _compute(self, chunk: Sequence[Batch]) -> Iterator[dict[str, Any]]:
        notes = [self._counter.notes(batch) for batch in chunk]
        agreement = self._council.agree(chunk, notes)
        own = agreement.own(self.mesh)
        signatures = [self._counter.with_tokens(found).columns for _, found in own]
        batches = [self._with_count(chunk[n], agreement.notes[n]) for n, _ in own]
        made = self._engine.evaluate(signatures, batches)
        told = {n: self._told(chunk[n], outputs) for (n, _), outputs in zip(own, made, strict=True)}
        return self._share(told, agreement)

    def _with_count(self, batch: Batch, notes: Sequence[Mapping[str, Any]]) -> Batch:
        """Every batch is normalised by its own label tokens, as in one process."""
        count = notes[self.mesh.dp_rank].get("labels")
        return batch if count is None else {**batch, TOKENS: torch.tensor(float(count))}

    def _told(self, batch: Batch, outputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """What this rank knows of a batch: outputs of its stages; labels and inputs it read."""
        options = self._options
        names = [n for n in outputs if n == "loss" or not options.only_loss]
        labels = () if options.only_loss else options.label_names
        is_last = self._engine.holds_last_stage
        return {
            "outputs": {name: outputs[name].detach().cpu() for name in names},
            "labels": {n: batch[n].cpu() for n in labels if is_last and n in batch},
            "inputs": {n: batch[n].cpu() for n in options.kept_inputs if is_last and n in batch},
        }

    def _share(
        self, told: Mapping[int, dict[str, Any]], agreement: Agreement
    ) -> Iterator[dict[str, Any]]:
        everyone = self._council.gather(told)
        for number in range(len(agreement.signatures)):
            for replica, found in enumerate(agreement.signatures[number]):
                if not found.columns:
                    continue
                known = [said[number] for said in everyone[replica :: self.mesh.dp]]
                merged: dict[str, Any] = {
                    part: {name: value for one in known for name, value in one[part].items()}
                    for part in ("outputs", "labels", "inputs")
                }
                merged["outputs"] = self._in_order(merged["outputs"], found)
                yield {**merged, "samples": num_samples(found)}

    def _in_order(self, outputs: dict[str, Any], found: BatchSignature) -> dict[str, Any]:
        signature = self._counter.with_tokens(found).columns
        order = self._engine.outputs(signature)
        return {name: outputs[name] for name in order if name in outputs}


def num_samples(found: BatchSignature) -> int:
    """Samples of a microbatch: the first size that its columns have in common."""
    return max((meta.shape[0] for _, meta in found.columns if meta.shape), default=0)


def nest(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Outputs by their first name: `hidden_states.output0`, … become one tuple."""
    nested: dict[str, Any] = {}
    for name, value in outputs.items():
        first, _, rest = name.partition(".")
        if rest:
            nested.setdefault(first, []).append(value)
        else:
            nested[first] = value
    return {name: tuple(v) if isinstance(v, list) else v for name, v in nested.items()}


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values
