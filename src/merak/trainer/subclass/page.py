"""The page docs/transformers.md, made from the table of overrides.

After a change of the table: `python -m merak.trainer.subclass.page > docs/transformers.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from merak.trainer.subclass.overrides import OVERRIDES, Decision

INTRODUCTION = """\
# What is the same as in transformers, and what is not

`MerakTrainer` is a subclass of `transformers.Trainer` and runs its training loop. What a script
does with a trainer is done as there, or refused with one sentence before anything is trained.
"""

IN_JOBS = {
    "data": (
        "every rank reads the dataset; the batches are those of one process, which replicas share "
        "out. Ranks of one replica that read different samples end the job before its first step"
    ),
    "arguments that differ by rank": (
        "refused before the first step, with the values of all ranks, and so are options of the "
        "optimizer's groups. Paths, levels of logs, names for loggers and workers of loaders may "
        "differ"
    ),
    "columns of batches": "the same in every batch; others are refused when they are met. Tensors, "
    "or [lists with an object for each sample](how-to/own-model.md#labels-of-any-size) that the "
    "loss alone reads",
    "attributes of `train_dataloader.dataset`": (
        "those of the script's own dataset, to read and to set"
    ),
    "random draws of datasets, collators and dropout": (
        "keyed by step and sample: the same in every layout, but other numbers than transformers "
        "draws"
    ),
    "a `compute_loss` of a subclass": (
        "one that takes no notice of `num_items_in_batch` is averaged over replicas, as DDP does; "
        "one that divides by it is that of one process. It may [read values, keep and log "
        "them](#what-a-loss-reads); where they decide the loss, mark it with `merak.eager_loss`"
    ),
    "the model's forward": (
        "traced once for each shape. What a callback changes is followed (a number such as "
        "a loss weight, a plain tensor, a method, a hook, an attribute that comes later); what "
        "cannot be followed ends the job with the line that read it"
    ),
    "tensors that forward writes": (
        "as in eager code: in buffers, plain attributes, and in lists and dicts of modules. "
        "Refused, with the line, is a plain tensor that forward replaces by another one from step "
        "to step, and a list or dict that it fills for the next; what it adds there and does not "
        "read is warned of"
    ),
    "lists and dicts that forward reads": (
        "of modules, globals and closures, nested ones too: a callback that changes an item is "
        "followed; what forward itself fills is as above"
    ),
    "`requires_grad`": "a parameter that a callback freezes stays as it is from then on",
    "hooks on modules and gradients": (
        "those of modules are traced with forward: what they keep is warned of. Those of gradients "
        "run; on parameters that several segments read, such as tied ones, they are refused"
    ),
    "callbacks that read or write gradients": (
        "see this rank's, which are warned of where they are a part; under ZeRO over replicas, or "
        "with `master_weights`, parameters have none, and such a callback is refused"
    ),
    "the trainer's `model`": (
        "has this rank's parameters alone. Once `train()` has ended, `state_dict`, "
        "`save_pretrained` and `torch.save` of it [read the whole weights from disk]"
        "(how-to/too-big.md#use-the-model-after-training), on any rank; before, as `generate` and "
        "calls always, they say what to use instead. The trainer's `gather_state_dict()` gives "
        "rank 0 the whole state dict, and [`merak.gathered_parameters`]"
        "(how-to/teacher.md#whole-parameters) every rank whole parameters. A callback that walks "
        "its parameters is warned that it sees a part"
    ),
    "callbacks that read or write parameters": (
        "parameters of other pipeline stages have shapes and names alone: an operator that needs "
        "their values ends the job with its line. So does one on "
        "[shards](how-to/teacher.md#shards-of-parameters) whose result would be another for the "
        "whole. Averages of a teacher: "
        "[`merak.TeacherAverage`](how-to/teacher.md)"
    ),
    "`save_model`, checkpoints": (
        "called on every rank, which save together; files are those of transformers. After "
        "`train()`, rank 0 may call `save_model` alone"
    ),
    "`is_world_process_zero()`, `is_local_process_zero()`": "true on rank 0 of the job alone",
    "accelerate's `is_main_process`": "likewise",
    "callbacks": (
        "called on every rank. What one asks for on some rank (to stop, save, evaluate or log: by "
        "the clock, or on the main process alone), all ranks do"
    ),
    "evaluation during training": (
        "traced and laid out before the first step, at the shape of each dataset's first batch, "
        "where `eval_strategy`, `eval_on_start` or `do_eval` says that the job evaluates: what "
        "cannot run is refused then"
    ),
    "metrics": (
        "those of rank 0, on every rank: a script may compute them where it saves or logs alone"
    ),
    "`Seq2SeqTrainer`, `predict_with_generate`": (
        "`MerakSeq2SeqTrainer` and `MerakSeq2SeqArguments`: while an evaluation lasts, every rank "
        "has a copy of the whole model, and the ranks share out the batches; without room for "
        "copies, [stages generate together](how-to/generate.md), as in `trainer.generate`"
    ),
    "`hyperparameter_search`": "with optuna in every job: rank 0 has the study, all "
    "ranks train its trials together; other backends in a job of one rank",
    "`training_step`, `prediction_step` called by hand": "in a job of one rank; refused in others",
    "`get_train_dataloader()` called by hand": "the loader of one process",
    "`loss_is_scaled_for_ga`": "as in transformers",
    "files of a checkpoint": (
        "the model and `trainer_state.json` as in transformers; the rest is the ranks' shards and "
        "JSON, and no pickle such as `optimizer.pt`"
    ),
    "`resume_from_checkpoint` of a folder that `transformers.Trainer` wrote": (
        "goes on from it in any layout; adapters and checkpoints of FSDP and DeepSpeed are refused"
    ),
    "a loss that is not finite": (
        "ends the training with a sentence; `nan_policy='skip'` leaves the step out"
    ),
    "logs": (
        "loggers and `on_log` also get tokens per second, MFU and memory, as measured; "
        "`state.log_history` is that of transformers"
    ),
    "`args.world_size`, `args.process_index`": (
        "the number of replicas, by which batch sizes are multiplied; the global rank"
    ),
    "`model_init`": "called as it is, on every rank with the same seed",
    "`torch_compile=True`": (
        "torch compiles the forward, recomputation and backward of each segment, under every "
        "schedule; collectives, draws, and what mutates a tensor, run as they are"
    ),
    "`push_to_hub`": "rank 0 pushes; if it cannot, every rank raises the reason",
    "`gradient_checkpointing=True`": "means `recompute='full'`, where `recompute` is not given",
}
"""What a job of several ranks does with what a script does, beside arguments and methods."""

JUDGED = """
## Judged by transformers' own tests

<!-- not run: clones a repository and installs packages -->
```console
git clone --depth 1 https://github.com/huggingface/transformers their
pip install parameterized sentencepiece optuna
python benchmarks/transformers_tests.py their
```

runs the clone's `tests/trainer` in a job of one rank, with transformers' classes and with Merak's.
It prints a table and the reason of every test that fails with Merak alone. With the tests of a
development tree of 5.16, transformers 5.23 and optuna installed, 219 pass with transformers and 209
with Merak. The 10 that differ:

| tests | because |
|---|---|
| 4 | look for `optimizer.pt` and other pickles, of which a checkpoint of Merak has none |
| 2 | rewrite the model's files in a checkpoint, whose checksums are then wrong |
| 1 | `fp16_full_eval` is refused |
| 1 | goes on after a loss that is not finite; `nan_policy='skip'` |
| 1 | a buffer that grows in every step |
| 1 | counts what is in the output folder, which also has the run's record; `run_record=False` |
"""

READS = """
## What a loss reads

```python
def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
    outputs = model(**inputs)
    loss = outputs.loss
    right = (outputs.logits.argmax(-1) == inputs["labels"]).float().mean()
    self.accuracies.append(self.accelerator.gather_for_metrics(right).mean().item())
    self.log({"accuracy": self.accuracies[-1]})
    return (loss, outputs) if return_outputs else loss
```

Forward and loss are traced, and run on the stages. Each tensor that `compute_loss` reads with
`.item()`, `.tolist()`, `.numpy()`, `float()`, `int()` or `bool()`, or keeps on `self`, is computed
there with the loss. After the step, one transfer gives the values to all ranks. Each rank then runs
`compute_loss` again for every microbatch of the step, of all replicas in their order, on tensors
without values: the model is not called, and each read gives its value. An evaluation does so for
each batch.

Such a run takes 7 ms of a processor for the metrics of a language model's fine-tuning, and 26 ms
where the loss writes into tensors, whose operators then run each time
(`python benchmarks/loss_replays.py`, two cores of an AMD EPYC, torch 2.13).

So every rank has on `self`, and logs, what one process has with dp times as many
`gradient_accumulation_steps`: lists, dicts and counters of `self` as well. `gather` and
`gather_for_metrics` of accelerate give the microbatch's own tensor, as in one process; they do not
cut those of a loader's last step.

- **What is read must not decide the loss.** `loss * 2 if loss.item() > 3 else loss` is refused with
  the line: compute with the tensor, choose with `torch.where`, or mark `compute_loss` with
  [`merak.eager_loss`](how-to/own-model.md#losses-that-values-decide). While it is traced, the loss
  runs with several made-up numbers, to find that and what each branch reads. A decision that shows
  later ends the training before the optimizer's step.
- What a trace does outside of Python's state (a file that `compute_loss` writes) it does with these
  made-up numbers. `self.log` waits for the step.
- The rank may decide what is read (`if self.is_world_process_zero(): self.log(…)`), not the loss.
- A tensor that it keeps in one step and computes with in the next is refused, as of forward.
- One that takes gradients through the model (`torch.autograd.grad` of its parameters or inputs) and
  reads values as well is refused.
- A `compute_loss_func` may read nothing.
"""

METHODS = """\
[Training arguments](arguments.md) has the decision on every argument, also on those that are
refused. Fields of a class of your own, a subclass of `MerakArguments`, are left alone.

## Methods that a subclass may override

The same table decides when the trainer is built, and again when it trains or evaluates: an override
that Merak would not call as transformers does is refused, and so is one of a method of a newer
transformers that it does not know. A method that is replaced by assignment (`Trainer.compute_loss =
f`, `trainer.log = MethodType(f, trainer)`) is an override like that of a subclass. One of
`transformers.Trainer` whose place a method of Merak's takes, such as `training_step`, is refused:
assign it to `merak.MerakTrainer`.
"""

_TITLES = {
    Decision.CALLED: "### Called as in transformers",
    Decision.EXTENDED: "### Called; the override calls `super()`",
    Decision.REFUSED: "### Refused",
}


def render() -> str:
    """The page as Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield INTRODUCTION
    yield "| what | in a job of several ranks |"
    yield "|---|---|"
    yield from (f"| {what} | {sentence} |" for what, sentence in IN_JOBS.items())
    yield READS
    yield JUDGED
    yield METHODS
    for decision, title in _TITLES.items():
        yield f"{title}\n"
        yield "| methods | how, or why not |"
        yield "|---|---|"
        groups: dict[str, list[str]] = {}
        for name, override in OVERRIDES.items():
            if override.decision is decision:
                groups.setdefault(override.sentence, []).append(f"`{name}`")
        for sentence, names in groups.items():
            yield f"| {', '.join(sorted(names))} | {sentence} |"
        yield ""
    yield "This page is made by `python -m merak.trainer.subclass.page`.\n"


if __name__ == "__main__":
    sys.stdout.write(render())
