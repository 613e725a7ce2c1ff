"""Sub-pipelined tensor parallelism against blocking all-reduces, over the ratio of both times.

Two ranks and the engine are real; the all-reduces go over gloo through a link whose rate is limited
(two network namespaces, which take root), or last a known time where namespaces are not allowed.
Computation is made to last a known time by sleeping, so that it takes no core from the link.

Five things take turns in one job, and their medians count: steps of whole microbatches, of
sub-microbatches, and of whole ones with all-reduces that take no time, which gives T_m, late ends
of sleeps and the operators included; and one all-reduce by itself: of the whole, which a step of
whole microbatches waits for, and of a sub-microbatch, twice which is the formula's T_a. The last
columns compare with the paper's formula and the simulator's model (`merak.plan.cost.overlap`).

With two GPUs the all-reduces go over NCCL, as fast as the link is, and a kernel of known length
computes, for T_a ÷ ratio. `--profile` saves a step of sub-microbatches as a Chrome trace, where the
kernels of one lie beside NCCL's of the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tools import report
from tools.lasting import Seconds, all_lasting
from torch import nn

import merak
from merak.engine import Engine
from merak.graph.joint.generate import Part
from merak.graph.joint.segment import Functions, JointSegment
from merak.graph.program.program import SegmentProgram, SubPipelinedRun, SubPipelinedSegment
from merak.graph.tensor_parallel import features
from merak.ops import collectives
from merak.parallel import ParallelModel
from merak.plan.cost.overlap import Layers

WIDTH, HIDDEN, SAMPLES = 64, 8, 8
NAMESPACES, DEVICE, PORT = ("merak0", "merak1"), "veth", 29571
Row = dict[str, Any]
RATIOS = (0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)


class Blocks(nn.Module):
    """Feed-forward blocks around residuals: one all-reduce each in both directions."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(num_layers))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, WIDTH) for _ in range(num_layers))
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x.square().mean()


@lru_cache(maxsize=1)
def cycles_per_s() -> float:
    """How fast a GPU counts while it is kept busy."""
    num_cycles = 10**8
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(num_cycles)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return num_cycles / min(times)


def compute(seconds: float, x: torch.Tensor) -> None:
    """Take a known time: of the GPU that a tensor is on, or of this rank by sleeping."""
    if x.is_cuda:
        torch.cuda._sleep(round(seconds * cycles_per_s()))
    else:
        time.sleep(seconds)


class Lasting:
    """Functions of a segment that compute for a known time, twice that in the backward.

    Args:
        joint: gives the functions.
        forward_s: how long the forward computes.
    """

    def __init__(self, joint: JointSegment, forward_s: float) -> None:
        self._joint = joint
        self._seconds = Seconds(forward_s, forward_s, 2 * forward_s)
        self._slowed = lru_cache(partial(all_lasting, seconds=self._seconds, slow=delayed))

    def parts(self, *args: Any) -> Functions | None:
        return self._slowed(self._joint.parts(*args))


def delayed(part: Part, seconds: float) -> Part:
    """A part that computes for a known time before its first all-reduce starts."""
    first, *others = part

    def slowed(given: list[Any]) -> tuple[torch.Tensor, ...]:
        compute(seconds, given[0])
        return first(given)

    return (slowed, *others)


def slow_down(engine: Engine, compute_s: float) -> None:
    """Let every block of the engine's stage compute for a known time."""
    stages = engine._state.base.stages
    (stage,) = stages.values()
    runs = [
        replace(run, segments=tuple(_slow_sub_microbatches(s, compute_s) for s in run.segments))
        if isinstance(run, SubPipelinedRun)
        else _slow_whole(run, compute_s)
        for run in stage.runs
    ]
    stages[0] = replace(stage, runs=tuple(runs))


def _is_block(segment: Any) -> bool:
    return any(".weight" in name and name.startswith("up") for name in segment.parameters)


def _slow_whole(run: SegmentProgram, compute_s: float) -> SegmentProgram:
    if not _is_block(run.segment):
        return run
    return replace(run, joint=Lasting(run.joint, compute_s))


def _slow_sub_microbatches(segment: SubPipelinedSegment, compute_s: float) -> SubPipelinedSegment:
    if not _is_block(segment.whole.segment):
        return segment
    slowed = [_slow_whole(half, compute_s / 2) for half in segment.programs]
    return replace(segment, programs=(slowed[0], slowed[1]))


def build(num_layers: int, tokens: int, split: bool) -> ParallelModel:
    """The blocks on two ranks, not yet slowed down."""
    torch.manual_seed(0)
    return merak.parallelize(
        Blocks(num_layers),
        {"x": torch.zeros(SAMPLES, tokens, WIDTH)},
        sub_pipelining="on" if split else "off",
        feature_dict={
            "up.*": features.Column(),
            "down.*": features.Row(),
            "first": features.Replicate(),
        },
    )


class KnownLink:
    """All-reduces that last a known time, one after another, in place of real ones.

    Args:
        seconds_per_byte: of one rank's tensor.
    """

    def __init__(self, seconds_per_byte: float) -> None:
        self.seconds_per_byte = seconds_per_byte
        self._free_at = 0.0

    def all_reduce(self, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        begin = max(time.perf_counter(), self._free_at)
        self._free_at = begin + self.seconds_per_byte * tensor.nbytes
        end = self._free_at
        if async_op:
            return KnownWork(end)
        KnownWork(end).wait()
        return None


class KnownWork:
    """A transfer that is over at a known time."""

    def __init__(self, end: float) -> None:
        self._end = end

    def wait(self) -> None:
        time.sleep(max(0.0, self._end - time.perf_counter()))


def limit_rate(bytes_per_s: float) -> None:
    """Limit what leaves this rank's namespace."""
    rate = f"{int(bytes_per_s * 8)}bit"
    command = ["tc", "qdisc", "replace", "dev", DEVICE + os.environ["RANK"], "root", "tbf"]
    subprocess.run([*command, "rate", rate, "burst", "16kb", "latency", "2s"], check=True)


def seconds(run: Callable[[], object], link: KnownLink | None) -> float:
    """How long something takes, with all-reduces through a known link or the real one."""
    dist.barrier()
    with _through(link):
        synchronize()
        begin = time.perf_counter()
        run()
        synchronize()
        return time.perf_counter() - begin


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def run_rank(args: argparse.Namespace) -> None:
    """One of the two ranks."""
    torch.set_num_threads(1)
    merak.init(tp=2, device="cuda" if args.link == "nccl" else "cpu")
    rows = [measure(args, ratio) for ratio in args.ratios]
    if dist.get_rank() == 0:
        load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
        title = f"{args.layers} layers, {args.link} link, load {load}"
        report.show({title: rows}, args.json)


def measure(args: argparse.Namespace, ratio: float) -> Row:
    """One line of the table.

    Args:
        args: of the command line.
        ratio: T_a / T_m as wanted.
    """
    mesh = merak.core.mesh.current_mesh()
    x = torch.randn(SAMPLES, args.tokens, WIDTH)
    result = torch.zeros_like(x, device=mesh.device)

    def add_up(tensor: torch.Tensor) -> None:
        collectives.dist.all_reduce(tensor, group=mesh.group("tp"))

    compute_s, link = args.compute_ms / 1e3, None
    if args.link == "known":
        link = KnownLink(ratio * compute_s / x.nbytes)
    elif args.link == "namespaces":
        limit_rate(x.nbytes / (ratio * compute_s))
    else:
        compute_s = _median_s(args.steps, partial(seconds, lambda: add_up(result), None)) / ratio
    models = [build(args.layers, args.tokens, split) for split in (False, True)]
    for model in models:
        slow_down(model.engine, compute_s)
    in_line, split = (partial(model.step, {"x": x}) for model in models)
    runs = [
        partial(seconds, lambda: add_up(result), link),
        partial(seconds, lambda: add_up(result[: SAMPLES // 2]), link),
        partial(seconds, in_line, link),
        partial(seconds, split, link),
        partial(seconds, in_line, KnownLink(0.0)),
    ]
    times = [[run() for run in runs] for _ in range(args.steps + 1)][1:]
    if args.profile is not None:
        save_profile(split, args.profile.with_suffix(f".{ratio:g}.json"), link)
    return line(args.layers, times)


def _median_s(repeats: int, run: Callable[[], float]) -> float:
    return statistics.median([run() for _ in range(repeats + 1)][1:])


def paper_s(layers: Layers) -> float:
    """Seconds of forward and backward by the paper's formula for sub-pipelining."""
    compute, communication = layers.compute_s, layers.communication_s
    longest = max(3 * compute, 2 * compute + communication, 2 * communication)
    return 0.75 * compute + 0.5 * communication + (layers.num_layers - 0.25) * longest


def line(num_layers: int, times: Sequence[Sequence[float]]) -> Row:
    """A line of the table from the times of all runs, step by step."""
    medians = (statistics.median(column) for column in zip(*times, strict=True))
    whole_s, sub_s, blocking, interleaved, alone = medians
    layers = Layers(num_layers, alone / (3 * num_layers), 2 * sub_s)
    model_s = layers.forward_s(True) + layers.backward_s(True)
    return {
        "T_m ms": 1e3 * layers.compute_s,
        "T_a ms": 1e3 * whole_s,
        "2 sub-microbatches' T_a ms": 2e3 * sub_s,
        "whole s": blocking,
        "sub-pipelined s": interleaved,
        "faster": blocking / interleaved,
        "formula s": paper_s(layers),
        "measured / formula": interleaved / paper_s(layers),
        "measured / model": interleaved / model_s,
    }


def save_profile(run: Callable[[], object], path: Path, link: KnownLink | None) -> None:
    """Run something under torch's profiler, and save what rank 0 did as a Chrome trace."""
    with torch.profiler.profile() as profile:
        seconds(run, link)
    if dist.get_rank() == 0:
        profile.export_chrome_trace(str(path))


@contextlib.contextmanager
def _through(link: KnownLink | None) -> Iterator[None]:
    if link is None:
        yield
        return
    real = collectives.dist
    collectives.dist = link  # type: ignore[assignment]
    try:
        yield
    finally:
        collectives.dist = real


def start(args: argparse.Namespace) -> None:
    """Start both ranks, each in a namespace of its own where that is allowed."""
    apart = args.link == "namespaces"
    if apart:
        join_namespaces()
    try:
        ranks = [subprocess.Popen(*_command(rank, apart)) for rank in range(2)]  # type: ignore
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a rank failed")
    finally:
        if apart:
            remove_namespaces()


def _command(rank: int, apart: bool) -> tuple[list[str]]:
    own = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": PORT,
        "MASTER_ADDR": "10.77.0.1" if apart else "127.0.0.1", "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    if apart:
        own["GLOO_SOCKET_IFNAME"] = f"{DEVICE}{rank}"
    before = ["ip", "netns", "exec", NAMESPACES[rank]] if apart else []
    settings = [f"{name}={value}" for name, value in own.items()]
    script = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--rank"]
    return ([*before, "env", *settings, *script],)


def join_namespaces() -> None:
    """Two namespaces with a cable between them."""
    remove_namespaces()  # what a run that was killed has left
    first, second = NAMESPACES
    commands = [
        f"netns add {first}",
        f"netns add {second}",
        f"link add {DEVICE}0 netns {first} type veth peer name {DEVICE}1 netns {second}",
    ]
    for i, name in enumerate(NAMESPACES):
        commands += [
            f"-n {name} addr add 10.77.0.{i + 1}/24 dev {DEVICE}{i}",
            f"-n {name} link set {DEVICE}{i} up",
            f"-n {name} link set lo up",
        ]
    for command in commands:
        subprocess.run(["ip", *command.split()], check=True)


def remove_namespaces() -> None:
    """Take both away, if they are there."""
    for name in NAMESPACES:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def namespaces_allowed() -> bool:
    """Whether this user may make network namespaces."""
    try:
        made = subprocess.run(["ip", "netns", "add", "merak-try"], capture_output=True, check=False)
    except OSError:
        return False
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", "merak-try"], check=False)
    return made.returncode == 0


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--compute-ms", type=float, default=40.0, help="T_m, a layer's forward")
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="T_a / T_m")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--link", choices=("namespaces", "known", "nccl"))
    parser.add_argument("--tokens", type=int, help="of a sample: 256, on GPUs 65536")
    parser.add_argument("--profile", type=Path, help="save sub-pipelined steps beside this path")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.link is None and torch.cuda.device_count() >= 2:
        args.link = "nccl"
    args.link = args.link or ("namespaces" if namespaces_allowed() else "known")
    args.tokens = args.tokens or (65536 if args.link == "nccl" else 256)
    if args.rank:
        run_rank(args)
    else:
        start(args)


if __name__ == "__main__":
    main()
