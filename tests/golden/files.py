"""Files beside checkpoints, as they were written once: plans, profiles, records, traces.

Each is written by `write`, which gives what it wrote; `read` gives what a file says now, in the
same words. `python -m tests.golden.formats` writes those that are not there.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from transformers import MixtralForCausalLM

import merak
from merak.cli.main import main as command
from merak.core.errors import PlanError
from merak.core.files.private_files import write_own_file
from merak.graph.cache.value_file import write_values
from merak.graph.ir.serialize import pack_model
from merak.graph.segment.build import BuiltGraph, GraphSource, build_timed
from merak.plan.cost.calibration import Curve
from merak.plan.cost.measured_times import SegmentTimes, load_times, save_times
from merak.plan.profile.profile import Profile
from merak.plan.profile.profile_file import load_profile, save_profile
from merak.plan.search.plan_file import read_plan, refuse_other_model
from merak.record.files import read_run
from tests.golden.formats import batch_of, model
from tests.unit.graph.stages import Pipeline, metas
from tests.unit.plan.profile.helpers import profile

STORED = Path(__file__).parent / "files"
EXPECTED = STORED / "expected.json"
"""What each says, by its name."""

PLAN, PROFILE, TIMES, TRACE = "plan.json", "profile.json", "times.json", "trace.graph"


def printed(*words: str) -> Any:
    """The JSON that a command prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        command([*words, "--json"])
    return json.loads(output.getvalue())


# ---- a plan: of two stages, for two devices of a cluster that is not here ----


def write_plan(folder: Path) -> Any:
    with tempfile.TemporaryDirectory() as config:
        own = model("float32", True).config
        own.architectures = [MixtralForCausalLM.__name__]
        own.save_pretrained(config)
        words = ("--model", config, "--cluster", "h100:2", "--global-batch", "8", "--seq", "8")
        pinned = ("--pp", "2", "--dp", "1", "--schedule", "zero_bubble_h1", "--microbatch", "2")
        (row, *_) = printed("plan", *words, *pinned, "--output", str(folder / PLAN))["plans"]
    known = read_plan(folder / PLAN)
    assert (known.candidate.schedule, known.candidate.partition) == (
        row["schedule"], tuple(row["partition"])
    )  # fmt: skip
    assert known.price["peak_memory_bytes"] == row["peak_memory_bytes"]
    return said_by_plan(folder)


def said_by_plan(folder: Path) -> Any:
    plan = read_plan(folder / PLAN)
    refuse_other_model(plan, model("float32", True), PLAN)
    with contextlib.suppress(PlanError):
        refuse_other_model(plan, torch.nn.Linear(2, 2), PLAN)
        raise AssertionError("a plan is taken for any model")
    figures = (plan.cluster, plan.optimizer, plan.sequence, plan.global_batch, dict(plan.price))
    return [plan.candidate.values(), *figures]


def losses_of_plan(folder: str) -> list[float]:
    """What a rank of a job sees that follows the plan."""
    merak.init(plan=str(Path(folder, PLAN)), device="cpu")
    samples = [{name: own[i] for name, own in batch_of(0).items()} for i in range(8)]
    with tempfile.TemporaryDirectory() as output:
        args = merak.MerakArguments(
            output_dir=output, plan=str(Path(folder, PLAN)), max_steps=2, logging_steps=1,
            learning_rate=1e-2, save_strategy="no", report_to="none", trace_cache="",
        )  # fmt: skip
        trainer = merak.MerakTrainer(model=model("float32", True), args=args, train_dataset=samples)
        trainer.train()
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def write_losses(folder: Path) -> Any:
    from tests.multirank.ranks import RankPool

    pool = RankPool()
    found, _ = pool.run(losses_of_plan, 2, str(folder))
    pool.close()
    return found


# ---- a profile: the times that it gives for sizes between those that were measured ----


def write_profile(folder: Path) -> Any:
    save_profile(folder / PROFILE, profile())
    return times_of(profile())


def times_of(own: Profile) -> Any:
    def at(curve: Curve) -> list[float]:
        return [curve.at(size) for size in (1e3, 1e5, 3e6)]

    rows: Iterable[Any] = (*own.links, *own.collectives)
    return {
        "hosts": own.hosts,
        "products": {name: at(curve) for name, curve in own.products},
        "others": [at(own.copies), at(own.functions), at(own.updates)],
        "links": [(row.kind, at(row.seconds)) for row in rows],
        "interference": own.interference,
        "segments": [
            (s.digest, s.size, s.seconds.forward_s, s.seconds.backward_s) for s in own.segments
        ],
        "speeds": (own.speeds.name, own.speeds.peak_rate(torch.float32)),
    }


def write_times(folder: Path) -> Any:
    times = [SegmentTimes("embed", 1e-3, 2e-3), SegmentTimes("head", 0.0, 0.5)]
    save_times(folder / TIMES, times)
    return [(own.name, own.forward_s, own.backward_s) for own in times]


def said_by_times(folder: Path) -> Any:
    found = load_times(folder / TIMES, ["embed", "head"])
    return [(own.name, own.forward_s, own.backward_s) for own in found]


# ---- a record: of a run on two ranks, and what `merak report` says of it ----


def write_record(folder: Path) -> Any:
    from tests.multirank.ranks import RankPool

    pool = RankPool()
    pool.run(run_recorded, 2, str(folder))
    pool.close()
    return report_of(folder)


def run_recorded(folder: str) -> None:
    """What a rank does: logs of two steps each."""
    merak.init(pp=2, device="cpu")
    parallel = merak.parallelize(
        model("float32", True), batch_of(0), num_microbatches=4, run_record=folder,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    )  # fmt: skip
    for step in range(4):
        loss = parallel.step(batch_of(step))
        if step % 2:
            parallel.figures(loss=float(loss))


def report_of(folder: Path) -> Any:
    """The report of a record, as figures and as it is printed; and its logs and measured steps."""
    with tempfile.TemporaryDirectory() as own:
        shutil.copytree(folder / "_merak", Path(own) / "_merak")
        found = printed("report", own)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            command(["report", own])
        text = output.getvalue().replace(own, "RUN")
    run = read_run(folder)
    logs = [(log.step, log.figures, log.memory_bytes, log.busy) for log in run.logs]
    steps = [
        [(str(action), start - own.begin_s, end - own.begin_s) for action, start, end in records]
        for own in run.steps
        for records in own.records
    ]
    del found["run"], found["page"]
    return json.loads(json.dumps(found | {"text": text, "logs": logs, "steps": steps}))


# ---- a trace: the loss of its program ----


def write_trace(folder: Path) -> Any:
    """As the cache does, but that it is of no source files, which are other ones elsewhere."""
    graph = built(None).graph
    content = write_values({"sources": {}, "graph": pack_model(graph)})
    write_own_file(folder / TRACE, without_folders(content))
    return loss_of(graph)


def without_folders(content: bytes) -> bytes:
    """A stored trace whose source lines are told from the folder of packages or of tests on."""
    text = bytes(load(content)["values"].tolist()).decode()
    text = re.sub(r'"/[^" ]*/(site-packages|tests)/', r'"\1/', text)
    return save({"values": torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)})


def built(cache: Path | None) -> BuiltGraph:
    """The segments of the model, and whether they come from a folder."""
    source = GraphSource(model("float32", True), cache_dir=cache)
    return build_timed(source, metas(batch_of(0)), training=True)


def loss_of(graph: Any) -> float:
    return float(Pipeline(graph, model("float32", True)).train(batch_of(0)))


@dataclass(frozen=True)
class Kind:
    """How a kind of file is written, and read.

    Args:
        write: writes it into a folder, and gives what it says.
        read: what the file in a folder says now.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


KINDS = {
    "plan": Kind(write_plan, said_by_plan),
    "profile": Kind(write_profile, lambda folder: times_of(load_profile(folder / PROFILE))),
    "times": Kind(write_times, said_by_times),
    "record": Kind(write_record, report_of),
}
"""By name. A trace is bound to the code that made it, so it has no reader of its own."""


def known() -> dict[str, Any]:
    """What was written, by kind."""
    return json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}


def write_missing() -> None:
    """Write the files that are not there, and what they say."""
    STORED.mkdir(exist_ok=True)
    writers = {name: kind.write for name, kind in KINDS.items()}
    writers |= {"trace": write_trace, "training by plan": write_losses}
    said = known()
    for name in sorted(writers.keys() - said.keys()):
        said[name] = writers[name](STORED)
        EXPECTED.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n")
