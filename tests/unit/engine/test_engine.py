"""The engine of a single rank."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import merak
from merak.core import mesh
from merak.core.errors import ArgumentsError, DataError, PlanError, TraceError
from merak.core.tensor_meta import Signature
from merak.data import signature
from merak.engine import local_programs
from merak.engine.build import build_engine
from merak.engine.engine import Engine
from merak.graph.segment.build import GraphSource
from merak.plan.engine_options import EngineOptions
from merak.trainer.optimizer_like import LocalParameters
from tests.tiers import slow
from tests.unit.engine.models import Skips, gpt2, number_batch, text_batch

pytestmark = pytest.mark.usefixtures("one_rank")


def engine_of(model: torch.nn.Module, batch: dict[str, torch.Tensor], **options: object) -> Engine:
    source = GraphSource(model=model)
    chosen = EngineOptions(**options)  # type: ignore[arg-type]
    return build_engine(source, signature(batch).columns, mesh.current_mesh(), chosen)


def train(engine: Engine, batches: list[dict[str, torch.Tensor]], step: int = 0) -> torch.Tensor:
    columns = [signature(batch).columns for batch in batches]
    return engine.train_step(step, columns, batches, 1.0 / len(batches))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_microbatches_sum_as_autograd_does(schedule: str) -> None:
    model = gpt2()
    expected = copy.deepcopy(model)
    batches = [text_batch(seed=i) for i in range(3)]
    engine = engine_of(model, batches[0], num_microbatches=3, schedule=schedule)
    losses = train(engine, batches)
    for number, batch in enumerate(batches):
        loss = expected(**batch).loss / 3
        assert losses[number].item() == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()
    for name, parameter in expected.named_parameters():
        assert torch.equal(engine.parameters[name].grad, parameter.grad), name


def test_a_step_leaves_the_users_random_state() -> None:
    engine = engine_of(gpt2(dropout=0.3), text_batch())
    torch.manual_seed(4)
    before = torch.get_rng_state()
    train(engine, [text_batch()])
    engine.evaluate([signature(text_batch()).columns], [text_batch()])
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_depends_on_the_step_and_the_microbatch_alone() -> None:
    engine = engine_of(gpt2(dropout=0.3), text_batch(), num_microbatches=2)
    batches = [text_batch(), text_batch()]
    first = train(engine, batches, step=3)
    assert first[0] != first[1]
    assert torch.equal(train(engine, batches, step=3), first)
    assert not torch.equal(train(engine, batches, step=4), first)


class ByLength(nn.Module):
    """A model whose code makes tensors of the batch's sizes, which a trace keeps as constants."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        length = torch.tensor([float(input_ids.shape[1])])
        late = (input_ids > 5).unsqueeze(-1) * torch.tensor([2.0 * input_ids.shape[1]])
        x = self.embed(input_ids)
        logits = self.head(x / length + x * late)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), input_ids.flatten())}


def _ids(length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(16, (2, length))}


def test_constants_of_several_shapes_in_one_step() -> None:
    model = ByLength()
    expected = copy.deepcopy(model)
    batches = [_ids(length) for length in (4, 7, 5)]
    engine = engine_of(model, batches[0], num_microbatches=3)
    losses = train(engine, batches)
    for number, batch in enumerate(batches):
        loss = expected(**batch)["loss"] / 3
        assert losses[number].item() == pytest.approx(loss.item(), rel=1e-6)
        loss.backward()
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(engine.parameters[name].grad, parameter.grad)


def test_shapes_met_last_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    model = ByLength()
    expected = copy.deepcopy(model)
    engine = engine_of(model, _ids(3), max_shapes=2)
    columns = [signature(_ids(length)).columns for length in range(3, 8)]
    first, second = engine._state.program_for(columns[1], True), columns[2]
    engine._state.program_for(second, True)
    assert engine._state.program_for(columns[1], True) is first  # and so used after the second
    engine._state.program_for(columns[3], True)
    assert engine._state.program_for(columns[1], True) is first
    assert engine._state.program_for(columns[0], True) is engine._state.base
    assert not _warnings(caplog)
    for step, length in enumerate((4, 5, 6, 7, 3, 4, 5, 6)):
        batch = _ids(length)
        (loss,) = train(engine, [batch], step)
        assert loss.item() == pytest.approx(expected(**batch)["loss"].item(), rel=1e-6)
    (said,) = _warnings(caplog)
    assert "Batches of 4 shapes" in said and "max_shapes=2 are cached; pad to few lengths" in said


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def test_a_number_of_kept_shapes_that_is_none() -> None:
    with pytest.raises(ArgumentsError, match="max_shapes=0 is no number of shapes to keep"):
        engine_of(gpt2(), text_batch(), max_shapes=0)


def test_shapes_not_met_before_are_traced() -> None:
    model = Skips()
    expected = copy.deepcopy(model)
    engine = engine_of(model, number_batch(5))
    batch = number_batch(3)
    (loss,) = train(engine, [batch])
    assert loss.item() == pytest.approx(expected(**batch)["loss"].item(), rel=1e-6)


def masked_batch(length: int, zeros: int, ignored: bool) -> dict[str, torch.Tensor]:
    batch = {name: column[:, :length].clone() for name, column in text_batch().items()}
    mask = torch.ones_like(batch["input_ids"])
    mask[1, length - zeros :] = 0
    if ignored:
        batch["labels"][1, length - zeros :] = -100
    return {**batch, "attention_mask": mask}


KINDS = {(0, True): True, (3, True): True, (3, False): False}
"""Zeros of a mask and whether labels are ignored there; and whether training needs no mask then."""


@pytest.mark.parametrize("first", [(0, True), slow((3, True)), slow((3, False))])
def test_what_is_known_of_masks_makes_programs(
    first: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The columns that are read are those of any batch; resized graphs are of the same kind."""

    def is_unmasked(columns: Signature, training: bool) -> bool:
        program = engine._state.program_for(columns, training)
        graphs = [p.segment.graph for own in program.stages.values() for p in own.segments]
        attention = torch.ops.aten.scaled_dot_product_attention.default
        found = [n for graph in graphs for n in graph.nodes if n.target is attention]
        return {(*node.args, None)[3] is None for node in found} == {True}

    monkeypatch.setattr(local_programs, "MASKED_AS_FAST", ())
    model = gpt2(layers=1)
    expected = copy.deepcopy(model)
    engine = engine_of(model, masked_batch(8, *first))
    assert "attention_mask" in engine.columns(signature(masked_batch(8, *first)).columns)
    for length in (8, 6, 8, 7):
        for kind, needs_none in KINDS.items():
            batch = masked_batch(length, *kind)
            columns = signature(batch, ends=True).columns
            (loss,) = engine.train_step(0, [columns], [batch], 1.0)
            assert loss.item() == pytest.approx(expected(**batch).loss.item(), rel=1e-6)
            assert is_unmasked(columns, True) is needs_none
            assert is_unmasked(columns, False) is (kind[0] == 0)


def test_evaluation_gives_all_outputs() -> None:
    model = Skips()
    expected = copy.deepcopy(model).eval()
    engine = engine_of(model, number_batch())
    columns = signature(number_batch()).columns
    (outputs,) = engine.evaluate([columns], [number_batch()])
    assert engine.outputs(columns) == ("loss", "logits")
    assert torch.equal(outputs["logits"], expected(**number_batch())["logits"])


def test_a_step_without_microbatches_changes_nothing() -> None:
    engine = engine_of(Skips(), number_batch())
    assert engine.train_step(0, [], []).shape == (0,)
    assert all(parameter.grad is None for parameter in engine.parameters.values())


@pytest.mark.parametrize("moment", ["forward", "backward", "evaluation"])
def test_a_failed_step_does_not_poison_the_next(moment: str) -> None:
    model = gpt2()
    engine = engine_of(model, text_batch(), num_microbatches=2)
    batches = [text_batch(seed=1), text_batch(seed=2)]
    expected = train(engine, batches)
    model.zero_grad()
    _fail(engine, batches, moment)
    model.zero_grad()
    assert torch.equal(train(engine, batches), expected)
    assert len(engine._state.stages[0]._saved) == 0


def _fail(engine: Engine, batches: list[dict[str, torch.Tensor]], moment: str) -> None:
    if moment == "forward":
        columns = [signature(batch).columns for batch in batches]
        with pytest.raises(KeyError):
            engine.train_step(0, columns, [batches[0], {"input_ids": batches[1]["input_ids"]}])
        bad = {**batches[1], "labels": batches[1]["labels"][:, :3]}
        with pytest.raises(RuntimeError, match="size mismatch"):
            engine.train_step(0, columns, [batches[0], bad])
    elif moment == "backward":

        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError

        handle = engine.parameters["transformer.h.0.ln_1.weight"].register_hook(fail)
        with pytest.raises(ZeroDivisionError):
            train(engine, batches)
        handle.remove()
    else:
        with pytest.raises(DataError):
            bad = {**batches[0], "input_ids": batches[0]["input_ids"] + 1000}
            engine.evaluate([signature(batches[0]).columns], [bad])


def test_more_stages_than_segments_says_the_most() -> None:
    sizes = len(engine_of(Skips(), number_batch())._state.base.stages[0].segments)
    with pytest.raises(PlanError, match=rf"99.*{sizes}"):
        engine_of(Skips(), number_batch(), partition=(99,))


def test_a_model_without_a_loss_is_refused() -> None:
    batch = text_batch()
    del batch["labels"]
    with pytest.raises(TraceError, match="loss"):
        engine_of(gpt2(), batch)


def test_local_parameters_are_a_model_for_optimizers() -> None:
    parameters = {"a.b": torch.nn.Parameter(torch.ones(2)), "c": torch.nn.Parameter(torch.ones(1))}
    local = LocalParameters(parameters)
    assert dict(local.named_parameters()) == parameters
    assert list(local.parameters()) == list(parameters.values())


def test_whole_weights_need_no_process_group() -> None:
    """A script that is started without torchrun saves as one of many ranks does."""
    model, x = nn.Sequential(nn.Linear(2, 3)), torch.randn(4, 2)
    parallel = merak.parallelize(
        model,
        example_batch={"input": x},
        loss_fn=lambda output, batch: output.square().mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    parallel.step({"input": x})
    found = parallel.gather_state_dict()
    assert found.keys() == before.keys()
    assert all(not torch.equal(found[name], before[name]) for name in found)


def test_a_former_name_of_a_method_still_works(caplog: pytest.LogCaptureFixture) -> None:
    batch = text_batch()
    engine = engine_of(gpt2(), batch, num_microbatches=1)
    engine.end_round()
    assert "Engine.end_round is today called complete_updates." in caplog.text
