"""What a run shows: a progress bar with loss and tokens/s, and a few lines at the end."""

import math
import time
from typing import Any

from transformers import ProgressCallback, Trainer, TrainerControl, TrainerState

from .corpus import Corpus


class Progress(ProgressCallback):
    """transformers' bar, with the last loss and the throughput since training began on it.

    Needs `include_num_input_tokens_seen` in the training arguments.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.started_at = time.perf_counter()
        self.tokens_before = state.num_input_tokens_seen

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self.training_bar is None or "loss" not in (logs or {}):
            return
        num_tokens = state.num_input_tokens_seen - self.tokens_before
        tokens_per_s = num_tokens / (time.perf_counter() - self.started_at)
        self.training_bar.set_postfix(
            {"loss": f"{float(logs['loss']):.2f}", "tokens/s": f"{tokens_per_s:,.0f}"}
        )


def show_progress(trainer: Trainer) -> None:
    """Put loss and tokens/s on transformers' progress bar, instead of printing logs above it.

    `MerakTrainer` has a display of its own.
    """
    if type(trainer).__module__.startswith("merak."):
        return
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(Progress)


def report(trainer: Trainer, corpus: Corpus, held_out_loss: float) -> None:
    """Say how well the model learned, where it is, and what to try next; rank 0 alone speaks.

    Args:
        trainer: after training and saving.
        corpus: what it learned from.
        held_out_loss: nats per token on files that were held out.
    """
    if not trainer.is_world_process_zero():
        return
    folder = trainer.args.output_dir
    num_tokens = trainer.state.num_input_tokens_seen
    unigram = corpus.unigram_loss
    write = f"pipeline('text-generation', '{folder}')('def main(', max_new_tokens=64)[0]"
    print(f"""
Loss on held-out files, in nats per token (and as perplexity):
  {held_out_loss:6.3f} ({math.exp(held_out_loss):4.0f})  this model, after {num_tokens:,} tokens
  {unigram:6.3f} ({math.exp(unigram):4.0f})  a model that knows only how often each token is

The model and its tokenizer are in {folder}, as transformers reads them.
Try next:
  let it write     python -c "from transformers import pipeline; print(*{write}.values())"
  train it longer  --max-steps 2000
  other degrees    torchrun --nproc-per-node 2 examples/pretrain_gpt2.py --degrees 1 1 2""")
