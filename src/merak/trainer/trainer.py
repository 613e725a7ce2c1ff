"""`MerakTrainer`: transformers' Trainer, whose model runs on a mesh of ranks.

The training loop, callbacks, loggers, learning rates and bookkeeping are transformers' own, and run
on every rank as if it were alone. What a single process would do with its model goes to the engine:
one step's microbatches forward and backward, the gradient norm, evaluation, saving.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Never, cast

import torch
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from accelerate.utils.memory import clear_device_cache  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.debug_utils import DebugOption
from transformers.trainer_utils import EvalLoopOutput, EvalPrediction, TrainOutput

from merak.arguments import (
    MerakArguments,
    check_arguments,
    single_process_accelerate,
)
from merak.arguments.folders import make_output_folder
from merak.arguments.former import TRAINER as FORMER
from merak.arguments.planned import chooses_microbatch, chooses_plan
from merak.core.announce import announce, show_announcements
from merak.core.errors import DataError, DoesNotFitError, WeightsError, refuse_unknown
from merak.core.health.roll_call import call_the_roll
from merak.core.mesh import current_mesh, mark_used
from merak.core.rank0 import warn_on_rank0
from merak.core.tensor_meta import Signature
from merak.data import check_not_empty, example_batch, shard_loader, split_non_tensors
from merak.data.digest import digest_columns
from merak.data.fetch import KnownColumns
from merak.data.own_loader import as_data_loader
from merak.engine import Engine
from merak.engine.build import build_with_forecast
from merak.engine.health.figures import memory_bytes
from merak.engine.inference.callable_model import callable_model
from merak.engine.layer_dropping import drop_layers
from merak.engine.planning.reductions import choose_reductions
from merak.engine.rank_arguments import example_of_rank0, refuse_different_optimizers
from merak.engine.step.last_step import LastStep
from merak.engine.step.loss_scale import LossScale
from merak.engine.step.optimizer_step import FiniteCheck
from merak.graph.segment.build import GraphSource
from merak.graph.segment.unread_arguments import unread_arguments
from merak.graph.weights.gather_weights import make_whole
from merak.graph.weights.laid_out import part_of, saving_whole
from merak.plan.engine_options import EngineOptions
from merak.plan.options import PARALLEL_OPTIONS
from merak.plan.summary import describe_mesh
from merak.trainer.batch_exchange import BatchExchange
from merak.trainer.before import check_saving, first_evaluation_batches
from merak.trainer.checkpoints.rollback import Rollbacks
from merak.trainer.columns import check_batch
from merak.trainer.evaluation import (
    Evaluation,
    evaluation_options,
    gives_loss,
    lay_out_evaluations,
)
from merak.trainer.generation import GeneratedBatches, with_whole_model
from merak.trainer.health.not_finite import SkippedSteps
from merak.trainer.last_step import refuse_unequal_replicas
from merak.trainer.live.display import JobBoard
from merak.trainer.logs import Throughput, announced_level
from merak.trainer.optimizer_like import (
    LocalParameters,
    optim_of,
    refuse_missing_optimizer,
    similar_optimizer,
)
from merak.trainer.planning.plan import check_plan_file, plan_training, plans_later
from merak.trainer.planning.replan import LayoutChange, move
from merak.trainer.search.study import shared_study
from merak.trainer.stepping import Stepping
from merak.trainer.subclass.agreed_metrics import (
    evaluations_agreed,
    metrics_of_rank0,
    metrics_on_rank0_alone,
)
from merak.trainer.subclass.callbacks import AgreedCallbacks
from merak.trainer.subclass.methods import bound, overriding
from merak.trainer.subclass.optimizer import parameter_order
from merak.trainer.subclass.overrides import refuse_overrides, refuse_replaced_accelerator
from merak.trainer.subclass.traced_loss import in_first_step, loss_of
from merak.trainer.tokens import TOKENS, TokenCounter
from merak.trainer.unsupported import (
    given_by_name,
    in_one_sentence,
    names_after,
    refuse_compiled,
    refuse_other_arguments,
    refuse_search,
    refuse_what_needs_all_gradients,
    set_use_cache,
    steps_other_tensors,
)

logger = logging.getLogger(__name__)


class MerakTrainer(Stepping):
    """Trains a model with data, tensor and pipeline parallelism; used as `transformers.Trainer`.

    Args:
        model: any traceable module that returns a loss; with or without weights
            (`merak.empty_weights`).
        args: `MerakArguments`.
        data_collator: makes a batch of samples; as the others, as of `transformers.Trainer`.
        train_dataset: samples to train on.
        eval_dataset: samples to evaluate with, or several by name.
        processing_class: tokenizer or processor, which is saved with the model.
        model_init: makes the model, for each trial of a search.
        compute_loss_func: traced with the model.
        compute_metrics: of an evaluation's outputs.
        callbacks: beside the usual ones.
        optimizers: an optimizer and a schedule of learning rates, for jobs of one rank.
        optimizer_cls_and_kwargs: class of the optimizer, and its arguments.
        preprocess_logits_for_metrics: what an evaluation keeps of the logits.
        **further: of other base classes; others are refused.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument that cannot be honoured.
    """

    has_kinds: ClassVar[bool] = False
    """Whether batches say what kind they are of (`merak.data.non_tensors.with_kind`)."""

    column_order: tuple[str, ...] = ()
    """Names of the first batch's arguments, in the order that `compute_loss` may read."""

    def __init__(
        self,
        model: nn.Module | None = None,
        args: MerakArguments | None = None,
        data_collator: Callable[[list[Any]], dict[str, Any]] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: Sequence[TrainerCallback | type[TrainerCallback]] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        **further: Never,
    ) -> None:
        kwargs = given_by_name(MerakTrainer, locals())
        self._prepare(args, kwargs)
        arguments = args if args is not None else MerakArguments(output_dir="tmp_trainer")
        self.scaler = LossScale(self.mesh.device) if arguments.fp16 else None
        self._skipped = SkippedSteps(FiniteCheck(self.scaler))
        if arguments.should_save:
            make_output_folder(str(arguments.output_dir))
        show_announcements(announced_level(arguments))
        if self.mesh.given is None:
            announce("%s", describe_mesh(self.mesh))
        if isinstance(model, nn.Module):
            refuse_compiled(model)
            set_use_cache(model, arguments.use_cache)
            make_whole(model)  # which another trainer may have trained
        with in_one_sentence("these arguments do not fit the trainer"):
            super().__init__(model=model, args=arguments, **kwargs)
        # Its hooks are of modules, which a traced model does not run; `locate_nan` is in its place.
        others: Any = [o for o in self.args.debug if o != DebugOption.UNDERFLOW_OVERFLOW]
        self.args.debug = others
        self.callback_handler = AgreedCallbacks(self, self.board, self._leave_last_weights)
        self._show_progress()
        self._compare_ranks()
        refuse_missing_optimizer(self)
        if not plans_later(self):
            self._plan()

    def _plan(self) -> None:
        """Choose what the arguments leave to be chosen, unless that is done."""
        chooses = chooses_plan(self.args) or chooses_microbatch(self.args)
        self._plan_watch = plan_training(self) or self._plan_watch
        if chooses:
            self._note_layout()

    def _note_layout(self) -> None:
        """Read what the mesh and the arguments say of a layout that was searched."""
        self.mesh = current_mesh()
        self._train_batch_size = self.args.train_batch_size
        announce("%s", describe_mesh(self.mesh))

    def _prepare(self, args: MerakArguments | None, kwargs: Mapping[str, Any]) -> None:
        """Refuse what cannot be honoured, and set what the constructor of transformers calls."""
        self.mesh = current_mesh()
        mark_used()
        known = names_after(type(self), MerakTrainer)
        refuse_unknown(type(self).__name__, kwargs, known, former=FORMER)
        refuse_other_arguments(type(self), args)
        self._is_alone = self.mesh.world_size == 1 and not steps_other_tensors(args)
        self._check_methods()
        self._connected: torch.optim.Optimizer | None = None
        self._loader_in_train: Callable[[], Any] | None = None
        self._evaluation: Evaluation | GeneratedBatches | None = None
        self.throughput = Throughput()
        self.board = JobBoard()
        self._plain: dict[str, Any] = {}  # arguments in every batch that are no tensors
        self._last_step = LastStep(self._skips)
        self._losses = torch.zeros(0)
        self._rollbacks = Rollbacks()

    def forget_layout(self) -> None:
        """Forget what was made for the layout before; the model is whole again on every rank."""
        self._note_layout()
        self.engine = self._recorder = self._batch_exchange = self._evaluation = None
        self.optimizer = self.lr_scheduler = self._connected = None
        self._planned_files = self._step = self._ran = None
        self._last_step = LastStep(self._skips)
        vars(self).pop("_saver", None)
        handler: Any = self.callback_handler  # which has what transformers gave it in the layout
        handler.optimizer = handler.lr_scheduler = handler.train_dataloader = None
        handler.eval_dataloader = None
        self.accelerator.free_memory()
        clear_device_cache(garbage_collection=True)  # of the engine, whose objects are in cycles

    def create_accelerator_and_postprocess(self) -> None:
        """Make accelerate take this rank for a single process, which leaves the model as it is."""
        # Precision is in the traced graph, and its segments are compiled.
        of_graph = ("mixed_precision", "no"), ("torch_compile_backend", None)
        requested = [(name, getattr(self.args, name)) for name, _ in of_graph]
        for name, value in of_graph:
            setattr(self.args, name, value)
        with single_process_accelerate():
            super().create_accelerator_and_postprocess()
        for name, value in requested:
            setattr(self.args, name, value)
        self.accelerator.device_placement = False
        self.accelerator.register_save_state_pre_hook(_refuse_parts)
        saves: Any = self.accelerator
        saves.save_model = saving_whole(self.accelerator.save_model)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Search as in transformers; with optuna on several ranks, which train trials together.

        Args:
            *args: as of transformers, in its order.
            **kwargs: as of transformers.

        Returns:
            The best run or runs, on every rank.

        Raises:
            ArgumentsError: another backend on several ranks, or trials beside each other.
        """
        given = inspect.signature(super().hyperparameter_search).bind(*args, **kwargs).arguments
        refuse_search(given.get("backend"), self.mesh.world_size)
        call_the_roll("trainer.hyperparameter_search")
        is_alone = self.mesh.world_size == 1
        with nullcontext() if is_alone else shared_study(self.mesh.rank):
            return super().hyperparameter_search(*args, **kwargs)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Call the user's `model_init`, for a new model and a new engine."""
        self.engine = None
        model: nn.Module = super().call_model_init(trial)
        return model

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Train with the methods that this trainer has by now, as its class or by assignment."""
        self._check_methods()
        self._plan()
        loader = self._own_loader
        if loader is None:
            return self._train_in_layouts(*args, **kwargs)
        # The loop asks the object, whose rank reads its share.
        self._loader_in_train, before = loader, vars(self).get("get_train_dataloader")
        self.get_train_dataloader = self._shard_train_loader  # type: ignore[method-assign]
        try:
            return self._train_in_layouts(*args, **kwargs)
        finally:
            del self.get_train_dataloader
            if before is not None:
                self.get_train_dataloader = before  # type: ignore[method-assign]
            self._loader_in_train = None

    def _train_in_layouts(
        self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> TrainOutput:
        """Train in the layout of the arguments, and in each that turns out to be faster."""
        while True:
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            except LayoutChange as change:
                found = change.with_traceback(None)  # whose frames hold the engine
            move(self, found)
            resume_from_checkpoint = found.checkpoint

    def _check_methods(self) -> None:
        """Refuse methods of the script's own that the ranks cannot call as transformers does."""
        refuse_overrides(type(self), MerakTrainer, vars(self), extended_only=not self._is_alone)
        if hasattr(self, "accelerator"):
            refuse_replaced_accelerator(self.accelerator)
        self._refuse_other_loss()

    # ---- the engine ----

    def build_engine(
        self, loader: DataLoader[Any], dataset: object = None, *, trains: bool = True
    ) -> Engine:
        """Trace, lay out and load the model, at the shape of the loader's first samples.

        Args:
            loader: a loader of a single process, as transformers makes it.
            dataset: the user's own, of which the loader's may have only some columns.
            trains: whether the loader's batches are those of training.
        """
        if self.engine is not None:
            return self.engine
        check_arguments(self.args)
        refuse_what_needs_all_gradients(self.args, self.mesh.pp)
        batch = example_batch(loader, seed=self.args.seed)
        check_plan_file(self, batch)
        check_batch(self, batch, dataset if dataset is not None else loader.dataset)
        self._flops_per_token = self._estimate_flops()
        source, columns = self.trace_source(batch)
        batch, _ = split_non_tensors(batch)
        of_training, trains = trains, trains or gives_loss(self, batch, self._plain)
        options = replace(self._engine_options(), trains=trains)
        options = choose_reductions(
            self.mesh, self.model, options, self.args.cluster, source.cache_dir
        )
        _, process_bytes = memory_bytes(self.mesh.device)
        in_training = in_first_step(self, loader) if of_training else nullcontext()
        as_too_large = _as_out_of_memory() if self.args.auto_find_batch_size else nullcontext()
        with in_training, as_too_large:
            unread = unread_arguments(source, dict(columns))
            self._plain |= {name: type(self._plain[name]) for name in unread}
            self.engine, forecast = build_with_forecast(source, columns, self.mesh, options)
        self._divides_by_count = TOKENS in forecast.layout.graph.columns_read()
        if trains:
            self._describe_job(forecast, columns, process_bytes)
        self._batch_exchange = BatchExchange(self.mesh, self.engine.progress)
        idle = self.engine.idle_pipeline("gradient_accumulation_steps") if trains else None
        if idle is not None:
            warn_on_rank0(logger, "%s", idle)
        return self.engine

    def trace_source(self, batch: Mapping[str, Any]) -> tuple[GraphSource, Signature]:
        """The model as it is called with a batch, and the batch's columns.

        Args:
            batch: its columns, and arguments of every batch that are no tensors.
        """
        columns, plain = split_non_tensors(batch)
        columns = example_of_rank0("the first batch", columns)
        self._plain, self.column_order = dict(plain), tuple(batch)
        self._counter = self._make_counter()
        source = self._graph_source(plain)
        source.example = columns
        drop_layers(source, self._engine_options())
        return source, self._counter.signature(columns).columns

    def _graph_source(self, plain: Mapping[str, Any]) -> GraphSource:
        self._traced_loss = self._loss_functions()
        loss_fn, loss_columns = loss_of(self)
        return GraphSource(
            model=self.model,
            loss_fn=loss_fn,
            loss_columns=loss_columns,
            fixed=plain,
            device=self.mesh.device,
            cache_dir=Path(self.args.trace_cache) if self.args.trace_cache else None,
            autocast=self.args.autocast,
        )

    def _engine_options(self) -> EngineOptions:
        args = self.args
        chosen: dict[str, Any] = {name: getattr(args, name) for name in PARALLEL_OPTIONS}
        chosen["feature_dict"] = args.feature_dict or None
        return EngineOptions(
            **chosen,
            num_microbatches=args.gradient_accumulation_steps,
            seed=args.seed,
            optimizer=partial(similar_optimizer, self),
            compilation=args.compilation,
            can_replan=not args.auto_find_batch_size,  # which is to be smaller instead
        )

    def _make_counter(self) -> TokenCounter:
        def count_labels(batch: Mapping[str, Any]) -> int | None:
            # transformers' own count knows which labels a causal loss shifts away.
            found = self._get_num_items_in_batch([batch], torch.device("cpu"))
            return None if found is None else int(found)

        takes_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return TokenCounter(
            count_labels=count_labels if takes_count else None,
            main_input=getattr(self.model, "main_input_name", "input_ids"),
            pad_token=getattr(self.processing_class, "pad_token_id", None),
        )

    def _estimate_flops(self) -> float:
        """Operations per input token, as transformers estimates them for the whole model."""
        one_token = {getattr(self.model, "main_input_name", "input_ids"): torch.empty(1)}
        return float(Trainer.floating_point_ops(self, one_token))

    # ---- data ----

    def get_train_dataloader(self) -> DataLoader[Any]:
        """The loader of this rank's microbatches in training, with the columns that it reads.

        Outside of `train`, and to a subclass that overrides it, it is that of one process.
        """
        if self._is_traced:
            return cast("DataLoader[Any]", self.callback_handler.train_dataloader)
        if self._overrides_loader:
            return super().get_train_dataloader()
        return self._shard_train_loader()

    @property
    def _overrides_loader(self) -> bool:
        return self._own_loader is not None

    @property
    def _own_loader(self) -> Callable[[], Any] | None:
        """The script's own method for the loader of one process; None for transformers'."""
        if self._loader_in_train is not None:
            return self._loader_in_train
        found: Any = overriding(self, "get_train_dataloader")
        if found is None or vars(self).get("get_train_dataloader") is found:
            return found
        return bound(found, self)  # type: ignore[no-any-return]

    def _train_loader(self) -> DataLoader[Any]:
        """The loader of one process, which a subclass may make."""
        if self.train_dataset is not None:
            check_not_empty(self.train_dataset)
        elif not self._overrides_loader:
            raise DataError("there is nothing to train on; pass train_dataset=… to MerakTrainer.")
        if self._own_loader is not None:
            return as_data_loader(self._own_loader())
        return Trainer.get_train_dataloader(self)

    def _shard_train_loader(self) -> DataLoader[Any]:
        loader = self._train_loader()
        if not self.is_in_train:
            return loader
        self._last_step.forget()
        self._skipped.start()
        self._rollbacks.start()
        evaluated = first_evaluation_batches(self)
        if self.engine is None:
            check_saving(self)
        refuse_unequal_replicas(self.args, loader, self.mesh.dp)
        with in_first_step(self, loader):
            return self._lay_out(loader, evaluated)

    def _lay_out(
        self, loader: DataLoader[Any], evaluated: Iterable[Mapping[str, Any]]
    ) -> DataLoader[Any]:
        """Lay out training and the first batches of its evaluations, for this rank's loader."""
        engine = self.build_engine(loader, self.train_dataset)
        spread = self.mesh.spread_experts
        refuse_unequal_replicas(self.args, loader, self.mesh.dp, engine.updates_inside, spread)
        assert self._counter is not None
        if not self._generates:
            lay_out_evaluations(self, engine, self._counter, self._plain, evaluated)
        whole = example_batch(loader, seed=self.args.seed)
        batch, _ = split_non_tensors(whole)
        self.throughput = Throughput(self._counter.counts_tokens(batch))
        self._counter.warn_of_padding(self.args.include_num_input_tokens_seen, batch)
        columns = engine.columns(self._counter.signature(batch).columns)
        assert self._batch_exchange is not None
        first = digest_columns(batch, columns)
        self._batch_exchange.compare(first, "step on the dataset's first samples")
        known = KnownColumns(frozenset(whole), self._columns_taken() - whole.keys())
        return shard_loader(
            loader,
            dp_degree=self.mesh.dp,
            dp_rank=self.mesh.dp_rank,
            columns=None if self.has_kinds else self._counter.to_read(columns),
            seed=self.args.seed,
            non_tensors=self._plain,
            whole_rounds=self.args.dataloader_drop_last and engine.needs_equal_replicas,
            known=None if self.has_kinds else known,
        )

    def _columns_taken(self) -> frozenset[str]:
        """Columns that forward takes by name, but for labels, which have several."""
        self._set_signature_columns_if_needed()
        of_labels = {"label", "label_ids", *(self.label_names or ())}
        return frozenset(self._signature_columns or ()) - of_labels

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of this rank's own parameters."""
        engine = self._engine_of_training()
        if engine is None:
            return super().create_optimizer(model)
        what = f"optim={optim_of(self)!r} cannot be made"
        with in_one_sentence(what), engine.watch.paused():
            optimizer: torch.optim.Optimizer = super().create_optimizer(
                LocalParameters(engine.optimizer_params.named)
            )
        return optimizer

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create both, of the parameters as they are laid out; also before `train`."""
        self._engine_of_training()
        super().create_optimizer_and_scheduler(num_training_steps)

    def _engine_of_training(self) -> Engine | None:
        """The engine; None in one process without data to trace the model with."""
        has_data = self.train_dataset is not None or self._overrides_loader
        if self.is_as_in_first_step:
            return None  # the optimizer stands in for the engine's
        if self.engine is None and not has_data and self.mesh.world_size == 1:
            return None
        self._plan()
        return self.engine or self.build_engine(self._train_loader(), self.train_dataset)

    def _wrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model as it is; the optimizer, which is there by now, steps this rank's tensors."""
        optimizer = self._inner_optimizer()
        if optimizer is not None and optimizer is not self._connected:
            assert self.engine is not None
            own = self.engine.optimizer_params
            decayed = self.get_decay_parameter_names(self.model)
            self._order = parameter_order(optimizer, self.model, own, decayed)
            self.engine.connect_optimizer(optimizer)
            self._has_shared_groups = refuse_different_optimizers(optimizer)
            self._connected = optimizer  # a second `train` goes on with it
        wrapped: nn.Module = super()._wrap_model(model, *args, **kwargs)
        return wrapped

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Create the schedule of the learning rate, the same on every rank."""
        kind = getattr(self.args.lr_scheduler_type, "value", self.args.lr_scheduler_type)
        with in_one_sentence(f"lr_scheduler_type={kind!r} cannot be made"):
            made: Any = super().create_scheduler(num_training_steps, optimizer)
        scheduler: torch.optim.lr_scheduler.LRScheduler = made
        return scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names that weight decay applies to, from the whole model's module types."""
        whole = self.model if isinstance(model, LocalParameters) else model
        names: list[str] = super().get_decay_parameter_names(whole)
        return names

    def is_local_process_zero(self) -> bool:
        """Whether this rank logs: one rank of the job, not one of each host."""
        return self.args.should_log

    # ---- evaluation ----

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the model as it is; all ranks call it together, in every layout.

        Args:
            *args: as of the model's own `generate`, the same on the ranks of a pipeline.
            **kwargs: likewise.

        Returns:
            What the model's own gives, on every rank: (samples, tokens) ids, or more.
        """
        call_the_roll("trainer.generate")
        self._plan()
        if self.engine is None and (self.train_dataset is not None or self._overrides_loader):
            self.build_engine(self._train_loader(), self.train_dataset)
        assert self.model is not None
        args, kwargs = send_to_device((args, kwargs), self.mesh.device)
        with callable_model(self.model) as model:
            return cast("Any", model).generate(*args, **kwargs)

    @property
    def _generates(self) -> bool:
        """Whether evaluations generate, with the whole model on every rank."""
        generates: bool = getattr(self.args, "predict_with_generate", False)
        return isinstance(self, Seq2SeqTrainer) and generates

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Run transformers' own loop over batches that replicas and stages compute together."""
        call_the_roll(f"trainer.{'predict' if description == 'Prediction' else 'evaluate'}")
        self._check_methods()
        self._plan()
        dataloader = as_data_loader(dataloader)
        check_not_empty(dataloader.dataset, "evaluation")
        rest = (description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if self._generates:
            return self._generation_loop(dataloader, *rest)
        if self.engine is None and (self.train_dataset is not None or self._overrides_loader):
            # Training is what the job is laid out for: at its shapes, with the labels of its loss.
            self.build_engine(self._train_loader(), self.train_dataset)
            first = example_batch(dataloader, seed=self.args.seed, description="evaluation")
            check_batch(self, first, dataloader.dataset)
        engine = self.build_engine(dataloader, trains=False)
        assert self._batch_exchange is not None and self._counter is not None
        options = evaluation_options(self, dataloader.dataset, prediction_loss_only, self._plain)
        evaluation = Evaluation(
            engine,
            self._batch_exchange,
            dataloader,
            self._counter,
            options,
            self._prepare_inputs,
        )
        self._evaluation = evaluation
        if not isinstance(self, Seq2SeqTrainer):  # which has its own, that drops no sample
            self.gather_function = self.accelerator.gather_for_metrics
        batches = cast("DataLoader[Any]", evaluation)  # all of a loader that the loop looks at
        alone, saving = metrics_on_rank0_alone(self), self._saving_before_refusal()
        with alone, saving, self._evaluated_parameters():
            output = super().evaluation_loop(batches, *rest)
        metrics_of_rank0(output.metrics)
        return output

    def _evaluated_parameters(self) -> AbstractContextManager[None]:
        """Context of an evaluation, which is of the averages if the arguments say so."""
        if self.engine is None or not self.args.ema_evaluation:
            return nullcontext()
        return self.engine.averaged()

    def _generation_loop(self, dataloader: DataLoader[Any], *rest: Any) -> EvalLoopOutput:
        if self.engine is None and any(p.is_meta for p in self.model.parameters()):
            self.build_engine(dataloader, trains=False)  # which has its weights
        try:
            with (
                self._evaluated_parameters(),
                with_whole_model(self, self.engine, self.mesh.device) as lines,
                metrics_on_rank0_alone(self),
            ):
                generated = GeneratedBatches(dataloader, self.mesh, lines, self.args.autocast)
                self._evaluation = generated
                output = super().evaluation_loop(cast("DataLoader[Any]", generated), *rest)
        finally:
            self._evaluation = None
        metrics_of_rank0(output.metrics)
        return output

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as transformers does, and go on with the metrics of rank 0."""
        with evaluations_agreed(self):
            metrics: dict[str, float] = super()._evaluate(*args, **kwargs)
        return metrics

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, torch.Tensor | Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **of_generation: Any,
    ) -> tuple[Any, Any, Any]:
        """The loss, logits and labels that the evaluation has computed for this batch."""
        of_transformers = super().prediction_step

        def evaluate(batch: Any) -> tuple[Any, Any, Any]:
            return of_transformers(model, batch, prediction_loss_only, ignore_keys, **of_generation)

        if self._evaluation is None:
            self._refuse_by_hand("prediction_step", "evaluate() or predict()")
            return evaluate(inputs)
        if isinstance(self._evaluation, GeneratedBatches):
            return self._evaluation.result(inputs, evaluate)
        if ignore_keys is None:
            ignore_keys = []
            if hasattr(self.model, "config"):
                config, default = self.model.config, ["past_key_values"]
                ignore_keys = getattr(config, "keys_to_ignore_at_inference", default)
        return self._evaluation.result(inputs, prediction_loss_only, ignore_keys)


def _refuse_parts(models: list[nn.Module], *_: Any) -> None:
    """Refuse accelerator.save_state, whose optimizer would be of this rank's part alone."""
    for model in models:
        if (part := part_of(model)) is not None:
            raise WeightsError(
                "accelerator.save_state saves the optimizer of one rank, and each has a part of it "
                f"({part.degrees}); let the trainer save checkpoints (save_strategy='steps')."
            )


@contextmanager
def _as_out_of_memory() -> Iterator[None]:
    """Let a batch that does not fit be what transformers makes smaller (auto_find_batch_size)."""
    try:
        yield
    except DoesNotFitError as error:
        raise torch.OutOfMemoryError(f"The batch would run out of memory. {error}") from error
