"""Progressive layer dropping beside plain training: loss curves at equal steps, and time saved.

A small model learns the bytes of Python's own library in one process, plainly and with sublayers
of its blocks dropped by chance, with the same weights and batches, in turns: GPT-2, or a decoder of
BERT's, which normalises its sums, or one of RoBERTa-PreLayerNorm's, which normalises before its
sublayers. The loss of texts that were held out is that of the whole model. Times are processor
time, which other work on the machine hardly moves: medians over the steps of a stretch. Beside them
is the fraction of the blocks' work that the schedule expects.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import transformers
from precision_curves import LENGTH, library_bytes
from tools import report

import merak
from merak.plan.layer_dropping import kept, kept_at

SAMPLES, HELD_OUT, LAYERS = 16, 64, 8


def small_model(kind: str) -> transformers.PreTrainedModel:
    """Eight blocks that look back alone, the same weights every time."""
    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=96, n_layer=LAYERS, n_head=4, use_cache=False
        )
        return transformers.GPT2LMHeadModel(config)
    bert = (transformers.BertConfig, transformers.BertLMHeadModel)
    norms_first = (
        transformers.RobertaPreLayerNormConfig, transformers.RobertaPreLayerNormForCausalLM
    )  # fmt: skip
    make_config, make_model = {"bert": bert, "bert-norms-first": norms_first}[kind]
    config = make_config(
        vocab_size=256, max_position_embeddings=LENGTH + 1, hidden_size=96, pad_token_id=0,
        num_hidden_layers=LAYERS, num_attention_heads=4, intermediate_size=384, is_decoder=True,
        use_cache=False,
    )  # fmt: skip
    return make_model(config)


class Training:
    """One way to train, which goes on where it has stopped."""

    def __init__(self, kind: str, rate: float, options: dict[str, Any]) -> None:
        example = torch.ones(SAMPLES, LENGTH, dtype=torch.long)
        self.parallel = merak.parallelize(
            small_model(kind),
            {"input_ids": example, "labels": example},
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
            max_grad_norm=1.0,
            **options,
        )

    def run(self, batches: list[torch.Tensor]) -> tuple[float, float]:
        """Mean loss of some steps, and the median of their processor seconds."""
        losses, seconds = [], []
        for ids in batches:
            start = time.process_time()
            losses.append(float(self.parallel.step({"input_ids": ids, "labels": ids})))
            seconds.append(time.process_time() - start)
        return statistics.mean(losses), statistics.median(seconds)

    def held_out(self, ids: torch.Tensor) -> float:
        """Mean loss of texts that were not trained on, by the whole model."""
        parts = ids.split(SAMPLES)
        found = [float(self.parallel.evaluate({"input_ids": p, "labels": p})) for p in parts]
        return statistics.mean(found)


def windows(text: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Texts from random places, (count, LENGTH)."""
    draws = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - LENGTH, (count,), generator=draws).tolist()
    return torch.stack([text[start : start + LENGTH] for start in starts])


def main() -> None:
    """Train both ways and compare."""
    parser = report.parser(__doc__)
    parser.add_argument(
        "--model", choices=["gpt2", "bert", "bert-norms-first"], default="gpt2", help="what learns"
    )
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--steps", type=int, default=160, help="optimizer steps")
    parser.add_argument("--stretch", type=int, default=40, help="steps of a row")
    parser.add_argument("--keep", type=float, default=0.5, help="layer_keep")
    parser.add_argument("--decay", type=float, default=0.05, help="layer_keep_decay")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    merak.init(device="cpu")
    text = library_bytes()
    cut = int(0.95 * len(text))
    batches = list(windows(text[:cut], options.steps * SAMPLES, 2).split(SAMPLES))
    others = windows(text[cut:], HELD_OUT, 3)
    plain = Training(options.model, options.rate, {})
    keeps = {"layer_keep": options.keep, "layer_keep_decay": options.decay}
    dropped = Training(options.model, options.rate, keeps)
    rows = []
    for first in range(0, options.steps, options.stretch):
        own = batches[first : first + options.stretch]
        (plain_loss, plain_s), (loss, seconds) = plain.run(own), dropped.run(own)
        steps = range(first, first + len(own))
        last = [kept(s, options.keep, options.decay) for s in steps]
        expected = [sum(kept_at(i + 1, LAYERS, p) for i in range(LAYERS)) / LAYERS for p in last]
        held, plain_held = dropped.held_out(others), plain.held_out(others)
        rows.append(
            {
                "steps": f"{first + 1} to {first + len(own)}",
                "loss, plain": round(plain_loss, 3),
                "dropped": round(loss, 3),
                "held out, plain": round(plain_held, 3),
                "held out, dropped": round(held, 3),
                "cpu ms, plain": round(1e3 * plain_s, 1),
                "cpu ms, dropped": round(1e3 * seconds, 1),
                "of plain": round(seconds / plain_s, 2),
                "blocks expected": round(statistics.mean(expected), 2),
            }
        )
    report.show({"Stretches of steps": rows}, options.json)


if __name__ == "__main__":
    main()
