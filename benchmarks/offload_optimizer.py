"""Step time where the optimizer's states are on the device, in host memory, or in a file.

One rank trains a GPT-2 whose segments are made to last by sleeping, as on a device that computes by
itself; the optimizer is torch's fused AdamW on the processor. Copies to and from host memory are
real ones behind a limit of their rate, each direction in a thread of its own. Rates are said as a
share of the one at which all gradients leave while a backward runs. "in turn" makes the same copies
with nothing beside them: what "host memory" is shorter was hidden. "… beside the backward" clips no
gradients, so that the processor steps a part of the tensors once its gradients have arrived. "…
delayed" clips, and steps beside all of the next step: its losses are others, and equal to each
other.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from offload import Link
from tools import report
from tools.lasting import Seconds, make_last
from transformers import GPT2Config, GPT2LMHeadModel

import merak

SEQUENCE, WORDS = 8, 512

CLIP = 1e9
"""A norm that no step has: the update waits for the norm of all gradients, and changes none."""


BESIDE = "… beside the backward"

DELAYED = "… delayed"


def model_of(hidden: int, layers: int) -> GPT2LMHeadModel:
    """The model that is trained, whose parameters take more time than its tokens."""
    torch.manual_seed(0)
    heads = max(1, hidden // 64)
    config = GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=64, vocab_size=WORDS
    )
    return GPT2LMHeadModel(config)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to train the model.

    Args:
        name: for people to read.
        home: of the optimizer's states.
        share: of the rate at which all gradients leave beside a backward; 0 for no limit.
        is_beside: whether copies run beside the computation.
        clips: whether gradients are clipped.
        delays: whether updates are delayed by a step.
    """

    name: str
    home: str
    share: float = 0.0
    is_beside: bool = True
    clips: bool = True
    delays: bool = False


def measure(way: Way, options: Any) -> dict[str, Any]:
    """A row: seconds of a step and of its optimizer, and the losses."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(0, WORDS, (1, SEQUENCE), generator=draws)
    batch = {"input_ids": ids, "labels": ids}
    parallel = merak.parallelize(
        model_of(options.hidden, options.layers),
        batch,
        optimizer=lambda own: torch.optim.AdamW(own, lr=1e-3, fused=True),
        max_grad_norm=CLIP if way.clips else None,
        offload_optimizer=way.home,
        delay_optimizer_update=way.delays,
    )
    params, forward_s = parallel.engine.optimizer_params, options.forward_ms / 1e3
    make_last(lambda segment: Seconds(forward_s, forward_s, 2 * forward_s))
    stages = parallel.engine._state.base.stages.values()
    num_segments = sum(len(stage.segments) for stage in stages)
    if params.host is not None and way.share:
        num_bytes = sum(tensor.nbytes for tensor in params.named.values())
        rate = way.share * num_bytes / (2 * num_segments * forward_s)
        params.host._to_host, params.host._to_device = (Link(rate, way.is_beside) for _ in range(2))
    assert parallel.optimizer is not None
    step, updates = parallel.optimizer.step, list[float]()

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        found = step(*args, **kwargs)
        updates.append(time.perf_counter() - start)
        return found

    parallel.optimizer.step = timed  # type: ignore[method-assign]
    steps, losses = [], []
    for _ in range(options.steps + 1):
        start = time.perf_counter()
        losses.append(float(parallel.step(batch)))
        steps.append(time.perf_counter() - start)
    return {
        "states": way.name,
        "rate": way.share or "",
        "step, ms": 1e3 * median(steps[1:]),
        "optimizer, ms": 1e3 * median(updates[1:]),
        "losses": losses,
    }


def main() -> None:
    """Print the table."""
    parser = report.parser(__doc__)
    parser.add_argument("--hidden", type=int, default=1024, help="width of the model")
    parser.add_argument("--layers", type=int, default=6, help="its layers")
    parser.add_argument("--forward-ms", type=float, default=50.0, help="of a segment")
    parser.add_argument("--steps", type=int, default=5, help="steps of which medians are taken")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 1.0, 0.5])
    options = parser.parse_args()
    merak.init(dp=1, tp=1, pp=1, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        ways = [Way("device", "off")]
        for share in (*options.rates, 0.0):
            ways.append(Way("host memory", "cpu", share))
            ways.append(Way(BESIDE, "cpu", share, clips=False))
            ways.append(Way(DELAYED, "cpu", share, delays=True))
            ways += [Way("… in turn", "cpu", share, is_beside=False)] if share else []
        ways += [Way("files", folder), Way(BESIDE, folder, clips=False)]
        ways.append(Way(DELAYED, folder, delays=True))
        rows = [measure(way, options) for way in ways]
    first = rows[0]
    losses = [row.pop("losses") for row in rows]
    for row in rows:
        row["over device"] = row["step, ms"] / first["step, ms"]
    for delays in (False, True):
        own = [found for way, found in zip(ways, losses, strict=True) if way.delays is delays]
        assert all(found == own[0] for found in own), "an offloaded optimizer has trained otherwise"
    report.show({"A step, and the optimizer's part of it; equal losses": rows}, options.json)


if __name__ == "__main__":
    main()
