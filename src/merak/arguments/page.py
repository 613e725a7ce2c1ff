"""The page docs/arguments.md, made from the decisions; `python -m merak.arguments.page` prints it.

After a change of the table: `python -m merak.arguments.page > docs/arguments.md`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping

from merak.arguments.fields import OWN_FIELDS
from merak.arguments.optimizers import OPTIMIZERS
from merak.arguments.rules import Layout, Policy, Rule
from merak.arguments.single_process import REFUSED_VARIABLES
from merak.arguments.table import ACCELERATOR, SECTIONS, SEQ2SEQ
from merak.arguments.training import MerakArguments

INTRODUCTION = """\
# Training arguments

`merak.MerakArguments` is a subclass of `transformers.TrainingArguments`. Build it after
`merak.init`, from Python or with `transformers.HfArgumentParser`. Every argument of transformers
keeps its meaning, or has no effect for the reason given here, or is refused: a value that is not
the default ends the script with one sentence, an `ArgumentsError`, before anything runs. A field
of a newer transformers that this table does not know is refused as soon as it is set.

Sizes of batches are those of one microbatch of one replica. A step takes
`per_device_train_batch_size` × `gradient_accumulation_steps` × dp samples: the number of
accumulation steps is the number of microbatches in the pipeline. `global_batch` sets this product,
and the accumulation steps follow. With `plan="auto"` or `per_device_train_batch_size="auto"` the
trainer chooses how a step is cut, and leaves its samples as they are; until then the arguments are
those of a job whose ranks are all replicas ([docs](plan.md#let-the-job-choose-its-plan)).

`args.world_size` is dp, the number by which batch sizes are multiplied, and `args.process_index` is
the global rank. Rank 0 alone logs and saves.

This page is made from the table in `merak.arguments.table` by `python -m merak.arguments.page`.
"""


def render() -> str:
    """The page as Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield "## Merak's own arguments\n"
    yield "| argument | default | meaning |"
    yield "|---|---|---|"
    for field in dataclasses.fields(MerakArguments):
        if field.name in OWN_FIELDS:
            yield f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |"
    yield "\n## Arguments of transformers\n"
    for title, rules in SECTIONS.items():
        yield f"### {title}\n"
        yield from _table("argument", rules)
    yield "### Arguments of `Seq2SeqTrainingArguments`\n"
    yield "In `merak.MerakSeq2SeqArguments`, for `merak.MerakSeq2SeqTrainer`.\n"
    yield from _table("argument", SEQ2SEQ)
    yield "### Options of `accelerator_config`\n"
    yield from _table("option", ACCELERATOR)
    yield "## Optimizers\n"
    yield "Names of `optim`. A name that is not here is refused.\n"
    yield from _table("optimizer", OPTIMIZERS)
    yield from _CLASSES
    yield "## Options of `accelerate launch`\n"
    yield "Start scripts with torchrun. These environment variables are refused when they are set:"
    yield ", ".join(f"`{name}`" for name in REFUSED_VARIABLES) + ".\n"


_CLASSES = (
    "",
    "Each class, by name or by `optimizer_cls_and_kwargs`, `create_optimizer` or the optimizer of "
    "`merak.parallelize`, is judged before the first step by what it does. Optimizers of its "
    "class and options step small tensors that are like the job's, 30 times by the same gradients: "
    "whole, cut as the layout cuts them, and each without the others.",
    "",
    "| it | with tp or `zero` | with pp alone |",
    "|---|---|---|",
    "| steps shards as it steps whole parameters (Adam, Lion, SGD) | allowed | allowed |",
    "| steps shards, given norms of whole parameters (LAMB, LARS, NovoGrad) | gets those norms | "
    "allowed |",
    "| steps whole parameters one by one (Muon, Adafactor) | gets whole ones | allowed |",
    "| looks across all parameters (Prodigy, D-Adaptation) | refused | refused |",
    "| draws random numbers, differs between equal runs, or takes more than 10 s | refused | "
    "allowed, with a warning |",
    "| wants a closure (LBFGS, SAM) | refused | refused |",
    "",
    "For one that gets norms, each rank reduces its shards, and ranks reduce the results of all "
    "parameters together, in one all-reduce of a few bytes a parameter. What an update does with "
    "them waits until then, so that during a step each rank holds as much of it as an optimizer "
    "that steps all parameters at once. Norms are 2-norms and all others, sums, means, largest and "
    "smallest elements. An optimizer whose code reads them as numbers has an all-reduce for each "
    "parameter. Parameters of which some rank has nothing, such as those with fewer rows than "
    "replicas, are stepped whole.",
    "",
    "For an optimizer that gets whole parameters, every parameter that is cut has an owner among "
    "the ranks that hold it, as in Megatron's layer-wise optimizer. It gathers the shards of the "
    "parameter and its gradient, steps it, has its states, and sends the shards back: two "
    "exchanges more a step, and on each rank about one copy more of the parameters and gradients "
    "that it steps.",
    "",
)


def _table(kind: str, rules: Mapping[str, Rule]) -> Iterator[str]:
    yield f"| {kind} | decision | how, or why not |"
    yield "|---|---|---|"
    for name, rule in rules.items():
        yield f"| `{name}` | {_decision(rule)} | {rule.sentence} |"
    yield ""


def _decision(rule: Rule) -> str:
    choices = [f"`{choice}`" for choice in rule.accepted if isinstance(choice, str) and choice]
    if choices:
        return f"{rule.policy.value}, but for the default, {' and '.join(choices)}"
    if rule.policy is not Policy.REFUSED or rule.layout is Layout.ANY:
        return rule.policy.value
    return f"{rule.policy.value} {rule.layout.value}"


if __name__ == "__main__":
    sys.stdout.write(render())
