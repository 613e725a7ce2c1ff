"""`merak profile`: speeds of this machine's devices, links and a model's segments, in a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from merak.cli.model import types_of
from merak.cli.options import (
    argument,
    autocast,
    backend,
    check_counts,
    device,
    json_output,
    option,
    parameter_dtype,
    takes,
)
from merak.cli.output import show, stdout_to_stderr
from merak.core.errors import CommandError
from merak.core.units import counted, size
from merak.launch.forkserver import ranks_prepared

if TYPE_CHECKING:
    from merak.plan.profile.profile import Profile
    from merak.zoo.profile_by_name import ProfileJob


@dataclass(frozen=True, kw_only=True)
class ProfileRequest:
    """Request for a profile, measured or merged."""

    model: str | None = option(
        None,
        "--model",
        "M",
        "Measure the segments of this model too: transformers class name, or a folder or file with "
        "a config.json.",
    )
    config: str | None = option(
        None, "--config", "JSON", "Fields of the config to change, as an object."
    )
    sequence: int | None = option(
        None, "--seq", "S", "Tokens of a sequence; the model's longest, up to 512."
    )
    microbatch: str = option(
        "1,2,4", "--microbatch", "B,…", "Samples of the microbatches to measure."
    )
    dtype: str | None = parameter_dtype()
    autocast: str | None = autocast()
    dp: int = option(1, "--dp", "D", "Data parallel degree; dp · tp · pp ranks are measured.")
    tp: int = option(1, "--tp", "T", "Tensor parallel degree, for which segments are measured too.")
    pp: int = option(1, "--pp", "P", "Pipeline parallel degree.")
    device: str | None = device()
    backend: str | None = backend()
    trust_remote_code: bool = option(
        False, "--trust-remote-code", "", "Run code that is in the model's folder."
    )
    output: str = option("profile.json", "--output", "FILE", "Where the profile is written.")
    merge: bool = option(
        False, "--merge", "", "Merge the profiles FILE … into one, instead of measuring."
    )
    files: list[str] | None = argument(None, "[FILE…]", "Profiles to merge, the most trusted last.")
    as_json: bool = json_output()


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """Report of a profile.

    Args:
        output: its file.
        device: name of the devices.
        torch: version of torch.
        hosts: ranks of every host.
        flops_per_s: of large matrix products, by element type.
        memory_bytes_per_s: of large copies.
        links: by kind, `latency_s` and `bytes_per_s` while all ranks send.
        collectives: how many kinds, groups and sizes were measured.
        segments: how many were measured.
    """

    output: str
    device: str
    torch: str
    hosts: dict[str, int]
    flops_per_s: dict[str, float]
    memory_bytes_per_s: float
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    collectives: int = 0
    segments: int = 0


@takes(ProfileRequest)
def profile(request: ProfileRequest) -> None:
    """Measure devices, links and a model's segments, for `merak plan` to read."""
    if request.merge != bool(request.files):
        raise CommandError("--merge and the profiles to merge go together; write --merge A B.")
    if request.merge:
        with stdout_to_stderr():
            report = _report(_merged(request), request.output)
        show(report, _page, request.as_json)
        return
    check_counts(request, "dp", "tp", "pp")
    with ranks_prepared(request.dp * request.tp * request.pp), stdout_to_stderr():
        from merak.core.health import failure
        from merak.core.rank0 import is_rank0
        from merak.launch.ranks import under_torchrun
        from merak.plan.profile.profile_file import save_profile
        from merak.zoo.profile_by_name import profile_job

        if under_torchrun():
            failure.install()
        measured = profile_job(_job(request))
        if is_rank0():
            save_profile(Path(request.output), measured)
    if is_rank0():
        show(_report(measured, request.output), _page, request.as_json)


def _merged(request: ProfileRequest) -> Profile:
    from merak.plan.profile.merge import merge_profiles
    from merak.plan.profile.profile_file import load_profile, save_profile

    merged = merge_profiles([load_profile(Path(path)) for path in request.files or ()])
    save_profile(Path(request.output), merged)
    return merged


def _job(request: ProfileRequest) -> ProfileJob:
    from merak.arguments import default_trace_cache
    from merak.launch.devices import check_backend, device_of
    from merak.zoo.model_source import parse_overrides
    from merak.zoo.profile_by_name import ProfileJob

    check_backend(request.backend, device_of(request.device))
    folder = default_trace_cache()
    dtype, autocast = types_of(request.dtype, request.autocast)
    return ProfileJob(
        degrees=(request.dp, request.tp, request.pp),
        device=request.device,
        backend=request.backend,
        model=request.model,
        overrides=parse_overrides(request.config),
        sequence=request.sequence,
        microbatches=_counts(request.microbatch),
        tp=(1,) if request.tp == 1 else (1, request.tp),
        dtype=dtype,
        autocast=autocast,
        trust_remote_code=request.trust_remote_code,
        cache=Path(folder) if folder else None,
    )


def _counts(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise CommandError(f"--microbatch {text} lists no sizes; write such as 1,2,4.")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _report(measured: Profile, output: str) -> ProfileReport:
    from merak.plan.cluster.from_profile import fit_link

    links = {}
    for own in sorted(measured.links, key=lambda own: own.senders):
        latency_s, bytes_per_s = fit_link(own.seconds)
        links[own.kind] = {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
    return ProfileReport(
        output=output,
        device=measured.machine.device,
        torch=measured.machine.torch,
        hosts=dict(measured.hosts),
        flops_per_s=dict(measured.speeds.flops_per_s),
        memory_bytes_per_s=measured.speeds.memory_bytes_per_s,
        links=links,
        collectives=sum(len(own.seconds.points) for own in measured.collectives),
        segments=len(measured.segments),
    )


def _page(report: ProfileReport) -> str:
    hosts = ", ".join(f"{ranks} on {host}" for host, ranks in report.hosts.items())
    rates = ", ".join(
        f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in report.flops_per_s.items()
    )
    return "\n".join(
        (
            f"{report.device}, torch {report.torch}; ranks: {hosts}",
            f"matrix products: {rates}; memory {size(int(report.memory_bytes_per_s))}/s",
            *(
                f"link {kind}: {1e6 * own['latency_s']:.1f} µs, {size(int(own['bytes_per_s']))}/s"
                for kind, own in report.links.items()
            ),
            f"{counted(report.collectives, 'collective')} and "
            f"{counted(report.segments, 'segment')} measured; written to "
            f"{report.output}",
        )
    )
