"""An option that is added to `ParallelOptions` is known to all that read options, by its lines."""

import json
import subprocess
import sys

import pytest

_ADDED = """
    dither: float = option(
        0.0, "SCALE", "Scale of the dither.", within=Range(0, 1, "use 0 to 1"), {planned}
    )
    master_weights: bool"""

_READ = """
import importlib.util, json, sys
from dataclasses import asdict, fields

spec = importlib.util.find_spec("merak.plan.options")
assert spec.name not in sys.modules
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
source = open(spec.origin).read()
assert source.count("\\n    master_weights: bool") == 1
exec(source.replace("\\n    master_weights: bool", sys.argv[1]), vars(module))

from typer.main import get_command
from merak.arguments.fields import TrainingFields
from merak.arguments.page import render
from merak.cli.main import app
from merak.cli.plan.report import PlanRow
from merak.core.errors import ArgumentsError
from merak.plan.engine_options import EngineOptions
from merak.plan.price.candidate import Candidate, option_values
from merak.plan.search.explain import describe
from merak.plan.search.neighbours import Neighbours
from merak.plan.search.pinned import pinned_options
from merak.core.elastic import GivenDegrees
from merak.plan.search.plan_file import candidate_from
from merak.plan.search.space import Job, space_of

commands = get_command(app).commands
flags = [n for n in commands if any("--dither" in p.opts for p in commands[n].params)]
refused = ""
try:
    EngineOptions(dither=2.0)
except ArgumentsError as error:
    refused = str(error)
known = dict(
    engine=EngineOptions(dither=0.5).dither,
    arguments=[f.default for f in fields(TrainingFields) if f.name == "dither"],
    page=render().count("| `dither` |"),
    flags=flags,
    refused=refused,
    priced=EngineOptions(dither=0.5).priced().get("dither"),
)
if "dither" in {f.name for f in fields(Candidate)}:
    pinned = pinned_options(EngineOptions(dither=0.5), GivenDegrees(), None)
    job = Job(num_devices=2, devices_per_node=2, global_batch=2, num_segments=4,
              problem=lambda *degrees: None)
    searched = space_of(job, pinned_options(EngineOptions(), GivenDegrees(), None)).candidates
    own = Candidate(dither=0.5)
    known |= dict(
        options=EngineOptions(**own.options()).dither,
        pinned=sorted({o.dither for o in space_of(job, pinned).candidates}),
        searched=sorted({o.dither for o in searched}),
        neighbour=0.5 in {o.dither for o in Neighbours(searched).of(searched[0])},
        file=candidate_from(json.loads(json.dumps(own.values()))).dither,
        words=describe(own),
        report="dither" in {f.name for f in fields(PlanRow)},
    )
print(json.dumps(known))
"""


def _known(planned: str) -> dict[str, object]:
    """What all that read options know of one that is added to them."""
    added = _ADDED.format(planned=planned)
    ran = subprocess.run(
        [sys.executable, "-c", _READ, added], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, object] = json.loads(ran.stdout.splitlines()[-1])
    assert (found["engine"], found["arguments"], found["page"]) == (0.5, [0.0], 1)
    assert found["refused"] == "dither=2.0 is out of range; use 0 to 1."
    return found


def test_priced_option_is_known_by_its_lines() -> None:
    found = _known('planned="priced"')
    assert found["priced"] == 0.5
    assert found["flags"] == ["memory", "plan", "rehearse"]


@pytest.mark.slow  # as the row above, for another kind
@pytest.mark.parametrize(
    ("planned", "searched"),
    [('planned="given"', [0.0]), ("searched=lambda own: (0.0, 0.5)", [0.0, 0.5])],
)
def test_option_of_a_layout_is_known_by_its_lines(planned: str, searched: list[float]) -> None:
    found = _known(planned)
    assert found["flags"] == ["memory", "plan", "rehearse"]
    assert found["options"] == found["file"] == 0.5
    assert found["pinned"] == [0.5]
    assert found["searched"] == searched
    assert found["neighbour"] == (len(searched) > 1)
    assert "dither=0.5" in str(found["words"])
    assert found["report"]
