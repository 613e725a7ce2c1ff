"""What a check makes of outcomes: rounding passes, anything else is named with its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from merak.check import Case, CheckOptions, EagerError, Job
from merak.check.check import trace_job
from merak.check.compare import (
    Disagreement,
    distances,
    exact_tolerance,
    output_distances,
    whole,
)
from merak.check.judge import Comparison, judge
from merak.check.reference import reference, with_reference
from merak.check.runs import Outcome, train_in_one_process
from merak.core.errors import MerakError
from merak.core.shards import ParameterShard
from merak.zoo.smallest import Version, first_that_trains

OPTIONS = CheckOptions(num_microbatches=2, steps=2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.last(self.drop(self.norm(self.first(x)).relu())).square().mean()
        return loss


class Broken(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ImportError("the package einops was not found")


class Endless(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 0


class InFours(Net):
    """Takes batches of a multiple of four samples alone."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.view(-1, 4, x.shape[-1]).flatten(0, 1))


class Running(Net):
    """Reads a buffer that its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale += 0.5
        return super().forward(x * self.scale)


class Noisy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + torch.rand_like(x))


def draw(step: int, samples: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(samples, 4, generator=generator)}


def job_of(model: type[nn.Module]) -> Job:
    return Job(Case(model.__name__, model, draw), options=OPTIONS)


def judged(tmp_path: Path, outcome: Outcome, *, evaluate: bool = False) -> Comparison:
    job = replace(job_of(Net), options=replace(OPTIONS, evaluate=evaluate))
    return judge(job, trace_job(job, tmp_path), [outcome], reference(job))


def test_the_same_run_is_right(tmp_path: Path) -> None:
    verdict = judged(tmp_path, train_in_one_process(job_of(Net)))
    assert verdict == Comparison(0.0, 0.0, 0.0, 0.0, None, None)


def test_a_wrong_gradient_is_named_with_its_place(tmp_path: Path) -> None:
    outcome = train_in_one_process(job_of(Net))
    outcome.gradients["first.weight"] *= 2
    outcome.gradients["last.bias"] = outcome.gradients["last.bias"] + 1e-3
    verdict = judged(tmp_path, outcome)
    assert verdict.gradient == pytest.approx(1.0)
    said = str(verdict.reason)
    assert "the gradient of last.bias is off by" in said and "2 of 6 gradients differ" in said
    assert f"{__file__}:" in said and "in segment" in said


def test_a_missing_gradient_is_wrong(tmp_path: Path) -> None:
    outcome = train_in_one_process(job_of(Net))
    del outcome.gradients["first.weight"]
    assert "the gradient of first.weight is off by 1.0e+00" in str(judged(tmp_path, outcome).reason)


def test_a_wrong_buffer_is_named(tmp_path: Path) -> None:
    outcome = train_in_one_process(job_of(Net))
    outcome.buffers["norm.running_mean"] *= 1.1
    said = str(judged(tmp_path, outcome).reason)
    assert "the buffer of norm.running_mean" in said


def test_a_wrong_output_of_an_evaluation_is_named(tmp_path: Path) -> None:
    job = replace(job_of(Net), options=replace(OPTIONS, evaluate=True))
    outcome = train_in_one_process(job)
    verdict = judged(tmp_path, outcome, evaluate=True)
    assert (verdict.evaluation, verdict.reason) == (0.0, None)
    assert len(outcome.evaluations) == 2 * 3  # batches; before, between and after the steps
    name = "loss of evaluation batch 1 after 1 steps"
    outcome.evaluations[name] = outcome.evaluations[name] * 1.01
    verdict = judged(tmp_path, outcome, evaluate=True)
    assert f"the output {name} is off by 1.0e-02" in str(verdict.reason)
    assert verdict.most == pytest.approx(0.01)
    del outcome.evaluations[name]
    assert "1 of 6 outputs of evaluations differ" in str(
        judged(tmp_path, outcome, evaluate=True).reason
    )


def test_a_mask_hides_no_difference() -> None:
    lowest = torch.finfo(torch.float32).min
    expected = {"logits": torch.tensor([1.0, lowest, float("-inf"), float("nan")])}
    assert output_distances(expected, expected) == {"logits": 0.0}
    found = {"logits": torch.tensor([1.1, lowest, float("-inf"), float("nan")])}
    assert output_distances(found, expected)["logits"] == pytest.approx(0.1)
    found = {"logits": torch.tensor([1.0, 0.0, float("-inf"), float("nan")])}
    assert output_distances(found, expected)["logits"] > 1
    turned = {"z": torch.tensor([1 + 1j])}
    assert output_distances({"z": turned["z"].conj()}, turned)["z"] == pytest.approx(2.0)


def test_a_number_that_is_none_is_wrong(tmp_path: Path) -> None:
    outcome = train_in_one_process(job_of(Net))
    outcome.gradients["last.weight"][0, 0] = float("nan")
    assert "the gradient of last.weight" in str(judged(tmp_path, outcome).reason)


def test_copies_that_differ_are_a_disagreement() -> None:
    one = Outcome(gradients={"a": torch.ones(2)}, place=(0, 0, 0))
    with pytest.raises(Disagreement, match="different copies of a"):
        whole([one, replace(one, gradients={"a": torch.zeros(2)}, place=(1, 0, 0))], "gradients")


def test_shares_are_joined() -> None:
    shards = {"a": ParameterShard(0, (4,), 2)}
    shares = [torch.arange(2.0), torch.arange(2.0, 4.0)]
    ranks = [
        Outcome(gradients={"a": s}, shards=shards, place=(0, i, 0)) for i, s in enumerate(shares)
    ]
    assert whole(ranks, "gradients")["a"].tolist() == [0, 1, 2, 3]


def test_tensors_of_mere_rounding_are_held_to_the_scale_of_the_model() -> None:
    expected = {"large": torch.tensor([1.0]), "tiny": torch.tensor([1e-9])}
    off = distances({"large": torch.tensor([1.0]), "tiny": torch.tensor([2e-9])}, expected)
    assert off["tiny"] == pytest.approx(1e-6)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Broken, "Broken needs a package that is not installed: the package einops was not found"),
        (Endless, "Endless does not train in one process: its losses are inf"),
        (Noisy, "Noisy draws random numbers while it runs"),
    ],
)
def test_what_one_process_cannot_train(model: type[nn.Module], said: str) -> None:
    with pytest.raises(EagerError, match=said):
        reference(job_of(model))


def test_a_buffer_that_forward_moves_is_no_draw() -> None:
    assert len(reference(job_of(Running)).losses) == OPTIONS.steps


def test_the_last_batch_of_an_evaluation_has_fewer_samples_where_the_model_takes_fewer() -> None:
    def evaluated(model: type[nn.Module]) -> list[int]:
        job, outcome = with_reference(
            replace(job_of(model), options=replace(OPTIONS, evaluate=True))
        )
        assert len(outcome.evaluations) == 2 * (OPTIONS.steps + 1)
        return [len(batch["x"]) for batch in job.evaluation_batches()]

    assert evaluated(Net) == [4, 3]
    assert evaluated(InFours) == [4, 4]
    with pytest.raises(EagerError, match="losses are inf"):
        evaluated(Endless)


def test_the_first_version_that_trains_is_taken() -> None:
    def versions(*models: type[nn.Module]) -> list[Version]:
        return [Version(lambda _, m=model: [job_of(m)]) for model in models]  # type: ignore[misc]

    trained = first_that_trains(versions(Endless, Net))
    assert trained.job.case.name == "Net"
    with pytest.raises(EagerError, match="package einops"):  # holds for every size
        first_that_trains(versions(Broken, Net))
    with pytest.raises(EagerError, match="losses are inf"):  # the first reason
        first_that_trains(versions(Endless, Endless))
    other_batch = Version(lambda _: [job_of(Endless), job_of(Net)])
    assert first_that_trains([other_batch]).job.case.name == "Net"


def test_what_a_batch_failed_with_is_known_to_the_next() -> None:
    def jobs(failures: Sequence[MerakError]) -> Iterator[Job]:
        yield job_of(Endless)
        assert "losses are inf" in str(failures[-1])
        yield job_of(Net)

    assert first_that_trains([Version(jobs)]).job.case.name == "Net"


@pytest.mark.parametrize(
    ("rounding", "most"),
    [(2e-5, 1e-9), (0.07, 7e-8), (40.0, 1e-6), (math.nan, 1e-9), (math.inf, 1e-9)],
)
def test_rounding_vanishes_in_float64_and_mistakes_do_not(rounding: float, most: float) -> None:
    assert exact_tolerance(rounding) == pytest.approx(most)
