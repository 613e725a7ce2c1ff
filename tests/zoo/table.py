"""Write the zoo's table: `python -m tests.zoo.table docs/zoo.md RESULTS.jsonl …`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.zoo.architectures import architectures
from tests.zoo.run import EAGER, EVALUATE, LAYOUTS, OPTIONS, RUNNING, Result, read

Results = Mapping[tuple[str, str], Result]

HEAD = """# The zoo

Every architecture in transformers' lists of models by task, in a small version that `merak check`
makes of its default config, and models written by hand in plain PyTorch (`tests/zoo/plain`). Each
trains for {steps} steps of {microbatches} microbatches of {samples} samples, once in one process in
plain PyTorch and once on ranks over gloo on the CPU.

A number is the largest difference of a gradient in the first step, relative to the largest
magnitude of its tensor. A number above 1e-5 is rounding, since it vanishes in float64, unless the
cell says "differs". In columns with tp, the fraction of the parameters that tensor parallelism
shards is given in brackets. The column "evaluate" has the largest difference of an output in
evaluation with tp=2 and pp=2, before, between and after the steps, of a whole batch and, where the
model takes fewer samples, of a batch with fewer samples.

The last column has, for a few layers of the default config's own widths and tp=8, the fraction of
the parameters that tensor parallelism shards, and how often ranks exchange activations in one
layer's forward and backward. A sample has 1,024 tokens, or as many as the model has positions for
where these are fewer, or 512 where its config names no limit. Parameters that the batch leaves
unread are left out, as of an encoder of sound beside a text alone. Where attention has a number of
heads that 8 does not divide, such as 12, two or four ranks each have the same ones, which `merak
check --widths real` says, with degrees that divide them. `python -m tests.zoo.widths docs/zoo.md`
fills the column; empty cells and tables without it have not been run, and a cell says so where an
architecture needs more memory or processor time than it may have.

A model of the list image-text to text trains on texts with an image in each sample, where its
small version takes such a batch, else on text alone. The same model in another list, such as Gemma3
among causal language models, ran on text alone there.

`make zoo` runs the zoo and writes this page. It takes hours, and continues where it stopped. Tasks
that have not been run are left out. The zoo is not part of the tests, which check forty different
architectures.

{counts}

"""

MOST_OF_A_REASON = 260


def main() -> None:
    """Write the page from the files that the arguments name."""
    page, *files = map(Path, sys.argv[1:])
    results: dict[tuple[str, str], Result] = {}
    for file in files:
        results |= {key: r for key, r in read(file).items() if r.reason != RUNNING}
    results = _trained_in_both(results) | results
    page.write_text("".join(render(results, architectures())), encoding="utf-8")


def render(results: Results, tasks: Mapping[str, str]) -> Iterable[str]:
    """The page, part by part."""
    run = {name for name, _ in results}
    tried = {task for name, task in tasks.items() if name in run}
    tasks = {name: task for name, task in tasks.items() if task in tried}
    yield HEAD.format(
        steps=OPTIONS.steps,
        microbatches=OPTIONS.num_microbatches,
        samples=OPTIONS.microbatch,
        counts="\n".join(_counts(results, tasks)),
    )
    for task in dict.fromkeys(tasks.values()):
        names = sorted(name for name, of in tasks.items() if of == task)
        yield f"## {task[0].upper()}{task[1:]}\n\n"
        yield from _row(["architecture", "traces", *LAYOUTS])
        yield from _row(["---"] * (2 + len(LAYOUTS)))
        for name in names:
            yield from _row([f"`{name}`", _traces(results, name), *_cells(results, name)])
        yield "\n"
    yield "## Reasons\n\n"
    for name in sorted(tasks):
        for reason in dict.fromkeys(_reasons(results, name)):
            yield f"- `{name}`: {reason}\n"


def _trained_in_both(results: Results) -> dict[tuple[str, str], Result]:
    """Who is evaluated between steps is trained there too, with tp and pp."""
    (both,) = (name for name in LAYOUTS if name != EVALUATE and LAYOUTS[name] == LAYOUTS[EVALUATE])
    return {(name, both): r for (name, layout), r in results.items() if layout == EVALUATE}


def _row(cells: Sequence[str]) -> Iterable[str]:
    yield f"| {' | '.join(cells)} |\n"


def _counts(results: Results, tasks: Mapping[str, str]) -> Iterable[str]:
    yield from _line("", "architectures", "not trainable in one process", "traced", *LAYOUTS)
    yield from _line(*["---"] * (4 + len(LAYOUTS)))
    for task in dict.fromkeys(tasks.values()):
        names = [name for name, of in tasks.items() if of == task]
        marks = Counter(_traces(results, name) for name in names)
        fine = [f"{_right(results, names, layout)}" for layout in LAYOUTS]
        alone = str(marks["not trained"])
        yield from _line(task, str(len(names)), alone, str(marks["yes"]), *fine)


def _line(*cells: str) -> Iterable[str]:
    yield f"| {' | '.join(cells)} |"


def _right(results: Results, names: Iterable[str], layout: str) -> str:
    found = [results[name, layout] for name in names if (name, layout) in results]
    right = sum(bool(r.report and r.report["ok"]) for r in found)
    return f"{right} of {len(found)}" if found else ""


def _traces(results: Results, name: str) -> str:
    eager = results.get((name, EAGER))
    if eager is not None and eager.reason:
        return "not trained"
    reports = [r.report for layout in LAYOUTS if (r := results.get((name, layout)))]
    if not reports:
        return "not run"
    return "yes" if any(report and report["segments"] for report in reports) else "no"


def _cells(results: Results, name: str) -> Iterable[str]:
    for layout, degrees in LAYOUTS.items():
        result = results.get((name, layout))
        if result is None:
            yield ""
            continue
        report = result.report or {}
        compared = f"{'evaluation' if layout == EVALUATE else 'gradient'}_max_rel_diff"
        if report.get(compared) is None:
            yield "no"
            continue
        is_split = degrees.tp > 1 and layout != EVALUATE
        split = f" ({report['tp_sharded_fraction']:.0%})" if is_split else ""
        mark = "" if report["ok"] else "**differs** "
        yield f"{mark}{report[compared]:.0e}{split}"


def _reasons(results: Results, name: str) -> Iterable[str]:
    for layout in (EAGER, *LAYOUTS):
        result = results.get((name, layout))
        if result is None:
            continue
        reason = result.reason or (result.report or {}).get("reason")
        if reason:
            yield plain_reason(reason)


def plain_reason(reason: str) -> str:
    """A reason in one line of the page, with the paths of packages from their own root."""
    text = re.sub(r"\S*/(site|dist)-packages/", "", " ".join(reason.split()))
    text = re.sub(r"\S*/(?=(src|tests)/)", "", text)
    text = re.sub(r"^\w+Error: ", "", text)
    text = text if len(text) <= MOST_OF_A_REASON else f"{text[:MOST_OF_A_REASON]} …"
    return re.sub(r"([<>|*_\[\]{}])", r"\\\1", text.replace("`", "'"))


if __name__ == "__main__":
    main()
