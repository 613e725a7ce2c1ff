"""Evaluation in transformers' own loop: batches run by all ranks, results on every rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import torch
from accelerate.data_loader import DataLoaderStateMixin  # type: ignore[import-untyped]
from accelerate.state import GradientState  # type: ignore[import-untyped]
from torch.utils.data import DataLoader
from transformers import Trainer

from merak.core.errors import DataError
from merak.core.mesh import Mesh
from merak.data import BatchSignature, drop_non_tensors, example_batch, shard_loader
from merak.data.digest import digest_columns, digests_of
from merak.data.fetch import is_iterable
from merak.data.objects import unpack_objects
from merak.engine import Engine
from merak.engine.build import lay_out_evaluation
from merak.graph.trace.calls.host_reads import READ
from merak.graph.trace.calls.outputs import LOSS, nested
from merak.trainer.batch_exchange import Batch, BatchExchange
from merak.trainer.health.evaluated import FiniteLosses
from merak.trainer.tokens import TOKENS, TokenCounter


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options of an evaluation: the outputs, labels and inputs that transformers' loop reads.

    Args:
        only_loss: no logits or labels.
        label_names: columns that are labels.
        returns_loss: whether the model gives a loss without labels, as encoders of pairs do.
        kept_inputs: columns to give back beside the results; None for all of them.
        counts_last: whether the last batch of a stream is cut to its own samples, as accelerate
            does in one process unless dispatch_batches=False.
        plain: arguments that are no tensors, which every batch has beside its columns.
        seed: of the loader's random draws.
        has_kinds: whether batches have other columns from one to the next, and say so.
    """

    only_loss: bool
    label_names: tuple[str, ...]
    returns_loss: bool
    kept_inputs: tuple[str, ...] | None
    counts_last: bool
    plain: Mapping[str, Any]
    seed: int
    has_kinds: bool

    def kept(self, columns: Iterable[str]) -> list[str]:
        """The columns of a batch that are returned beside the results."""
        names = self.kept_inputs
        return [name for name in columns if names is None or name in names]


def gives_loss(trainer: Trainer, columns: Container[str], plain: Mapping[str, Any]) -> bool:
    """Whether transformers' loop asks for the loss of a batch.

    Args:
        trainer: whose evaluation it is.
        columns: names of the batch's columns.
        plain: its arguments that are no tensors.
    """
    return _returns_loss(trainer, plain) or _are_labels_in(columns, trainer.label_names)


def _returns_loss(trainer: Trainer, plain: Mapping[str, Any]) -> bool:
    requested = plain.get("return_loss")
    return not trainer.label_names and bool(
        trainer.can_return_loss if requested is None else requested
    )


def _are_labels_in(columns: Container[str], label_names: Sequence[str]) -> bool:
    """Whether a batch has labels: as transformers has it, either all of them or none."""
    return bool(label_names) and all(name in columns for name in label_names)


def evaluation_options(
    trainer: Trainer, dataset: object, only_loss: bool | None, plain: Mapping[str, Any]
) -> EvaluationOptions:
    """Requests of transformers' loop for an evaluation.

    Args:
        trainer: whose evaluation it is.
        dataset: what is evaluated.
        only_loss: no logits or labels; None leaves it to the arguments.
        plain: arguments that are no tensors, which every batch has beside its columns.
    """
    args = trainer.args
    dispatched = getattr(args.accelerator_config, "dispatch_batches", None)
    kept: tuple[str, ...] | None = ()
    if "inputs" in args.include_for_metrics:
        main = str(getattr(trainer.model, "main_input_name", "input_ids"))
        kept = None if args.batch_eval_metrics else (main,)
    return EvaluationOptions(
        only_loss=args.prediction_loss_only if only_loss is None else only_loss,
        label_names=tuple(trainer.label_names),
        returns_loss=_returns_loss(trainer, plain),
        kept_inputs=kept,
        counts_last=is_iterable(dataset) and dispatched is not False,
        plain=plain,
        seed=args.seed,
        has_kinds=getattr(trainer, "has_kinds", False),
    )


class _PlainLoader(DataLoaderStateMixin):  # type: ignore[misc]
    """What accelerate looks at where a user's own loader, which it has not made, is evaluated."""

    def __init__(self) -> None:
        self.gradient_state = GradientState()
        self.reset()


@contextmanager
def seen_by_accelerate(
    loader: Any, is_last: bool, num_samples: int | None = None
) -> Iterator[None]:
    """Context in which accelerate sees a single process's loader at one of its batches.

    Args:
        loader: the loader.
        is_last: whether the batch is the last one.
        num_samples: to which accelerate is to cut what it gathers; None for what the loader says.
    """
    if not isinstance(loader, DataLoaderStateMixin):
        loader = _PlainLoader()  # a user's own: the training's loader must not cut its results
    loader.begin()  # the last to begin is the one that counts
    loader.end_of_dataloader = is_last
    if num_samples is not None:
        loader.remainder = num_samples
    try:
        yield
    finally:
        loader.end()


class Evaluation:
    """A loader that runs its batches through the model, several at a time in the pipeline.

    The batches are those of a single process, in its order; each replica runs every dp-th.

    Args:
        engine: this rank's engine.
        batch_exchange: exchanges shapes and results between ranks.
        loader: the loader of a single process.
        counter: counts label tokens, where the loss takes them.
        options: of the evaluation.
        prepare_inputs: the trainer's hook, which may change a batch before the model reads it.
    """

    def __init__(  # one argument for each thing that an evaluation needs of the trainer
        self,
        engine: Engine,
        batch_exchange: BatchExchange,
        loader: DataLoader[Any],
        counter: TokenCounter,
        options: EvaluationOptions,
        prepare_inputs: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> None:
        self.dataset = loader.dataset
        self._engine = engine
        self._batch_exchange = batch_exchange
        self._loader = loader
        self._counter = counter
        self._options = options
        self._prepare_inputs = prepare_inputs
        self._current: dict[str, Any] = {}
        self._inputs: dict[str, Any] = {}  # as the loop has them

    @property
    def mesh(self) -> Mesh:
        """The grid of ranks."""
        return self._batch_exchange.mesh

    def __len__(self) -> int:
        """The number of batches of a single process."""
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """The inputs of each batch for the loop; its results are then in `result`.

        Meanwhile accelerate sees the loader of a single process, at the end of which it cuts what
        it gathers to the samples that are left, and a metric of batches is settled.
        """
        finite = FiniteLosses()
        everything = self._computed()
        while (computed := next(everything, None)) is not None:
            self._current, is_last = computed
            del computed  # which would hold the outputs while the next ones are computed
            finite.add(self._current["outputs"].get(LOSS), is_last)
            samples = self._current["samples"] if is_last and self._options.counts_last else None
            with seen_by_accelerate(self._loader, is_last, samples):
                self._inputs = self._given_back(self._current)
                yield self._inputs
            self._current = {}

    def _given_back(self, computed: Mapping[str, Any]) -> dict[str, Any]:
        if not computed["inputs"]:  # a stand-in, for the loop to count the samples of
            return {"samples": torch.empty(computed["samples"], 0)}
        known = self._options.plain if self._options.kept_inputs is None else {}
        plain = {n: value for n, value in known.items() if not isinstance(value, type)}
        return {**computed["inputs"], **plain}

    def result(
        self, inputs: object, only_loss: bool, ignore_keys: Sequence[str]
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of the current batch, each None where there is none.

        Args:
            inputs: of the batch, as they came out of the loader.
            only_loss: no logits or labels.
            ignore_keys: outputs to leave out.

        Raises:
            DataError: there are labels, and the model makes no loss of them; or the inputs are
                others, with which the model has not been run.
        """
        if not self._current:
            raise DataError(
                "prediction_step is called outside of an evaluation, but all ranks of the pipeline "
                "compute its batches together; call trainer.predict(dataset) in its place, which "
                "gives the outputs and labels of all samples."
            )
        if inputs is not self._inputs:
            raise DataError(
                "prediction_step of a subclass gives other inputs than the evaluation's, but the "
                "pipeline has run the batch by then; change it in _prepare_inputs, which an "
                "evaluation calls before."
            )
        made = self._current["outputs"]
        self._engine.replay_evaluated(self._current["signature"], made)
        outputs = nested({n: value for n, value in made.items() if not n.startswith(READ)})
        labels = self._current["labels"]
        has_loss = labels is not None or self._options.returns_loss
        if has_loss:
            _check_loss(outputs)
        loss = outputs.pop(LOSS) if has_loss else None
        if only_loss:
            return loss, None, None
        if has_loss:  # which transformers takes a tuple's first element for
            outputs.pop("output0", None)
        logits = tuple(value for name, value in outputs.items() if name not in ignore_keys)
        return loss, _single(logits), _single(labels or ()) if has_loss else None

    # ---- computing ----

    def _computed(self) -> Iterator[tuple[dict[str, Any], bool]]:
        """The batches' results in order, each with whether it is the last one."""
        size = 1 if self._engine.evaluates_at_once else 2 * self.mesh.pp
        rounds = iter(self._rank_loader())
        chunk = list(islice(rounds, size))
        while chunk:
            following = list(islice(rounds, size))
            yield from self._compute(chunk, is_last=not following)
            chunk = following

    def _rank_loader(self) -> DataLoader[Any]:
        options = self._options
        batch = example_batch(self._loader, seed=options.seed, description="evaluation")
        sample = drop_non_tensors(batch, options.plain)
        signature = self._counter.signature(sample)
        read = list(self._engine.columns(signature.columns, training=False))
        if self._engine.holds_last_stage:
            labels = [name for name in options.label_names if name in sample]
            read += [*labels, *options.kept(sample)]
        first = digest_columns(sample, read)
        self._batch_exchange.compare(first, "evaluation of the dataset's first samples")
        return shard_loader(
            self._loader,
            dp_degree=self.mesh.dp,
            dp_rank=self.mesh.dp_rank,
            columns=None if options.has_kinds else self._counter.to_read(read),
            seed=options.seed,
            non_tensors=options.plain,
        )

    def _compute(
        self, chunk: Sequence[Batch], is_last: bool
    ) -> Iterator[tuple[dict[str, Any], bool]]:
        """The results of some rounds, in order; whole outputs are here for one round at a time."""
        prepared = [self._prepare_inputs(dict(batch)) if batch else batch for batch in chunk]
        metadata = [self._counter.metadata(batch) for batch in prepared]
        samples = [digests_of(batch) for batch in chunk]
        exchanged = self._batch_exchange.exchange(prepared, metadata, samples)
        own = exchanged.own(self.mesh)
        signatures = [self._counter.with_tokens(found).columns for _, found in own]
        batches = [self._with_count(prepared[n], exchanged.metadata[n]) for n, _ in own]
        only_loss = self._options.only_loss
        made = self._engine.evaluate_each(signatures, batches, exchanged.columns, only_loss)

        def run(numbers: Iterable[int]) -> dict[int, dict[str, Any]]:
            mine = {n for n, _ in own}
            held = mine.intersection(numbers)
            found = {n: self._results(chunk[n], prepared[n], next(made)) for n in sorted(held)}
            if not held or max(mine) in held:
                # Take part in what other replicas run, and wait for what has been sent: whoever
                # reads the results may end the evaluation.
                deque(made, maxlen=0)
            return found

        numbers = range(len(chunk))
        num_left = exchanged.num_microbatches
        for together in [numbers] if self._options.only_loss else [[n] for n in numbers]:
            everyone = self._batch_exchange.gather(run(together))
            for number, replica in product(together, range(self.mesh.dp)):
                found = exchanged.signatures[number][replica]
                if found.columns:
                    num_left -= 1
                    ranks = self._batch_exchange.of_replica(everyone, replica)
                    yield self._merged(ranks, number, found), is_last and not num_left

    def _with_count(self, batch: Batch, metadata: Sequence[Mapping[str, Any]]) -> Batch:
        """A batch with its own count of label tokens, which its loss is divided by."""
        count = metadata[self.mesh.dp_rank].get("labels")
        return batch if count is None else {**batch, TOKENS: torch.tensor(float(count))}

    def _results(
        self, batch: Batch, prepared: Batch, outputs: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """This rank's results of a batch: outputs, and the labels and inputs that it read."""
        options = self._options
        names = [n for n in outputs if n == LOSS or n.startswith(READ) or not options.only_loss]
        labels = () if options.only_loss else options.label_names
        kept = options.kept(name for name in batch if name != TOKENS)
        is_last = self._engine.holds_last_stage
        return {
            "outputs": {name: outputs[name].detach().cpu() for name in names},
            "labels": {n: prepared[n].cpu() for n in labels if is_last and n in prepared},
            "inputs": {n: batch[n].cpu() for n in kept if is_last},
        }

    def _merged(
        self, ranks: Iterable[dict[int, dict[str, Any]]], number: int, found: BatchSignature
    ) -> dict[str, Any]:
        """The results of a batch, which its ranks have parts of and no longer hold."""
        known = [results.pop(number) for results in ranks]
        merged: dict[str, Any] = {
            part: {name: value for one in known for name, value in one[part].items()}
            for part in ("outputs", "labels", "inputs")
        }
        merged["outputs"] = self._in_order(merged["outputs"], found)
        merged["labels"] = self._labels(merged["labels"], found)
        columns = self._counter.with_tokens(found).columns
        return {**merged, "samples": num_samples(found), "signature": columns}

    def _labels(self, results: Mapping[str, Any], found: BatchSignature) -> tuple[Any, ...] | None:
        """The labels of a batch, none where only the loss is wanted; None if it has none."""
        if not _are_labels_in(found.names, self._options.label_names):
            return None
        given = unpack_objects(results)
        return tuple(given[name] for name in self._options.label_names if name in given)

    def _in_order(self, outputs: dict[str, Any], found: BatchSignature) -> dict[str, Any]:
        signature = self._counter.with_tokens(found).columns
        order = self._engine.outputs(signature)
        return {name: outputs[name] for name in order if name in outputs}


def _check_loss(outputs: Collection[str]) -> None:
    """Check that a model makes a loss of the labels of an evaluation.

    Raises:
        DataError: it does not.
    """
    if LOSS not in outputs:
        raise DataError(
            "the model returns no loss for the labels of an evaluation, only "
            f"{', '.join(outputs)}; let it return one, or give label_names=[]."
        )


def lay_out_evaluations(
    trainer: Trainer,
    engine: Engine,
    counter: TokenCounter,
    plain: Mapping[str, Any],
    batches: Iterable[Mapping[str, Any]],
) -> None:
    """Trace, lay out and check what the evaluations of a training run, before its first step.

    Args:
        trainer: whose evaluations they are.
        engine: this rank's engine.
        counter: counts label tokens, where the loss takes them.
        plain: arguments that are no tensors, which every batch has beside its columns.
        batches: the first of each dataset. Further shapes are laid out when they come.

    Raises:
        DataError: an evaluation has labels, and the model makes no loss of them.
        TraceError: the model cannot be evaluated.
    """
    known = set()
    for batch in batches:
        signature = counter.signature(drop_non_tensors(batch, plain)).columns
        kind = tuple((name, meta.dtype, len(meta.shape)) for name, meta in signature)
        if kind in known:
            continue
        known.add(kind)
        otherwise = "train without eval_strategy and do_eval"
        outputs = lay_out_evaluation(engine, signature, otherwise)
        if gives_loss(trainer, [name for name, _ in signature], plain):
            _check_loss(outputs)


def num_samples(found: BatchSignature) -> int:
    """The number of samples of a microbatch: the first size that its columns have in common."""
    return max((meta.shape[0] for _, meta in found.columns if meta.shape), default=0)


def _single(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 else values
