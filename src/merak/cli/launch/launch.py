"""`merak launch`: the same script under torchrun, Slurm, Kubernetes, Ray or SkyPilot."""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from merak.cli.options import argument, json_output, option, takes
from merak.cli.output import show
from merak.core.elastic import AUTO_PLAN
from merak.core.errors import ArgumentsError, CommandError, PackageError
from merak.core.units import counted
from merak.launch.clusters.job import RECIPES, ClusterJob, job_name, torchrun
from merak.launch.clusters.kubernetes import KubernetesOptions, manifest
from merak.launch.clusters.ray_train import driver
from merak.launch.clusters.skypilot import SkyOptions, task
from merak.launch.clusters.slurm import SlurmOptions, batch_script
from merak.launch.clusters.start import Launch, start

app = typer.Typer(
    help="Start a script or a recipe on a cluster, through a launcher that it has.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_SETTINGS = {"allow_interspersed_args": False}  # words after the script belong to the script


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """Report of a launch.

    Args:
        engine: that starts the job.
        file: that is written for it; None where a command is enough.
        text: of that file.
        command: that starts the job.
        started: whether it was run; false with `--dry-run`.
    """

    engine: str
    file: str | None
    text: str | None
    command: str
    started: bool


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Request to start a job; the options that all launchers have."""

    script: str = argument(MISSING, "SCRIPT", "A .py file, or a recipe (.yaml) of merak train.")
    arguments: list[str] | None = argument(None, "[ARGS]...", "Arguments of the script.")
    nodes: int = option(1, "--nodes", "N", "Nodes of the job.")
    devices_per_node: int = option(1, "--devices-per-node", "D", "Ranks of a node.")
    device: str = option("cuda", "--device", "cuda|cpu", "What each rank has: a GPU, or none.")
    name: str | None = option(None, "--name", "NAME", "Name of the job; that of the script.")
    max_restarts: int = option(0, "--max-restarts", "N", "Restarts of all ranks after a fault.")
    dry_run: bool = option(False, "--dry-run", "", "Print what would be written and started.")
    as_json: bool = json_output()


@dataclass(frozen=True, kw_only=True)
class WrittenRequest(LaunchRequest):
    """Request for a launcher that reads a file."""

    output: str | None = option(None, "--output", "FILE", "File to write; named after the job.")


@dataclass(frozen=True, kw_only=True)
class TorchrunRequest(LaunchRequest):
    """Request for torchrun on this node."""

    endpoint: str | None = option(
        None, "--rdzv-endpoint", "HOST:PORT", "Where nodes meet; needed for several nodes."
    )


@dataclass(frozen=True, kw_only=True)
class SlurmRequest(WrittenRequest):
    """Request for a Slurm job."""

    time: str | None = option(None, "--time", "TIME", "Time limit, as sbatch takes it.")
    partition: str | None = option(None, "--partition", "NAME", "Partition of the cluster.")
    account: str | None = option(None, "--account", "NAME", "Account that pays.")
    cpus_per_device: int | None = option(None, "--cpus-per-device", "N", "Cores of each rank.")
    save_s: int = option(120, "--save-seconds", "S", "Ranks save so long before the time ends.")


@dataclass(frozen=True, kw_only=True)
class KubernetesRequest(WrittenRequest):
    """Request for a PyTorchJob."""

    image: str = option(MISSING, "--image", "IMAGE", "Image with merak and the script in it.")
    namespace: str | None = option(None, "--namespace", "NAME", "Namespace; the current one.")
    shared_memory: str = option("16Gi", "--shared-memory", "SIZE", "Size of /dev/shm.")
    working_dir: str | None = option(None, "--working-dir", "DIR", "Where the script starts.")
    claim: str | None = option(None, "--claim", "NAME", "Volume claim to mount at /runs.")
    save_s: int = option(120, "--save-seconds", "S", "Seconds of a pod after SIGTERM.")
    pod_restarts: int = option(3, "--pod-restarts", "N", "Restarts of pods.")


@dataclass(frozen=True, kw_only=True)
class SkyRequest(WrittenRequest):
    """Request for a SkyPilot task."""

    accelerator: str = option("H100", "--accelerator", "GPU", "GPU to rent.")
    cloud: str | None = option(None, "--infra", "INFRA", "Where to rent; the cheapest.")
    setup: str = option(
        "pip install merak-train", "--setup", "COMMAND", "Installs what every node needs."
    )
    use_spot: bool = option(False, "--spot", "", "Rent devices that may be taken away.")


@app.command(
    "torchrun",
    context_settings=_SETTINGS,
    epilog="Example: merak launch torchrun --devices-per-node 8 train.py",
)
@takes(TorchrunRequest)
def launch_torchrun(request: TorchrunRequest) -> None:
    """Start the ranks of this node with torchrun."""
    job = _job(request)
    if job.nodes > 1 and request.endpoint is None:
        raise CommandError(
            f"--nodes {job.nodes} needs --rdzv-endpoint HOST:PORT, one address that all nodes "
            "reach; run the same command on each node."
        )
    command = torchrun(job, str(job.nodes), request.endpoint)
    _launch(request, Launch("torchrun", None, None, tuple(command), "torch"))


@app.command(
    "slurm",
    context_settings=_SETTINGS,
    epilog="Example: merak launch slurm --nodes 4 --devices-per-node 8 --time 12:00:00 train.py",
)
@takes(SlurmRequest)
def launch_slurm(request: SlurmRequest) -> None:
    """Queue a batch script with one torchrun for each node."""
    text = batch_script(_job(request), SlurmOptions(**_taken(request, SlurmOptions)))
    file = _file(request, "sbatch")
    needs = "Slurm's client commands (or run this on a login node)"
    _launch(request, Launch("slurm", file, text, ("sbatch", file), needs))


@app.command(
    "kubernetes",
    context_settings=_SETTINGS,
    epilog="Example: merak launch kubernetes --image registry/merak --nodes 4 "
    "--devices-per-node 8 train.py",
)
@takes(KubernetesRequest)
def launch_kubernetes(request: KubernetesRequest) -> None:
    """Apply a PyTorchJob of Kubeflow's training operator."""
    text = manifest(_job(request), KubernetesOptions(**_taken(request, KubernetesOptions)))
    file = _file(request, "pytorchjob.yaml")
    _launch(request, Launch("kubernetes", file, text, ("kubectl", "apply", "-f", file), "kubectl"))


@app.command(
    "ray",
    context_settings=_SETTINGS,
    epilog="Example: merak launch ray --nodes 4 --devices-per-node 8 train.py",
)
@takes(WrittenRequest)
def launch_ray(request: WrittenRequest) -> None:
    """Run a driver whose Ray Train workers are the ranks."""
    file = _file(request, "ray.py")
    if not request.dry_run and find_spec("ray") is None:
        raise CommandError(
            "merak launch ray needs the package ray, which is not installed; run "
            "pip install 'merak-train[ray]', or use --dry-run to see what would be started."
        )
    _launch(request, Launch("ray", file, driver(_job(request)), ("python", file), "Python"))


@app.command(
    "skypilot",
    context_settings=_SETTINGS,
    epilog="Example: merak launch skypilot --nodes 2 --devices-per-node 8 --accelerator H100 "
    "train.py",
)
@takes(SkyRequest)
def launch_skypilot(request: SkyRequest) -> None:
    """Rent nodes of any cloud with SkyPilot, and run the job there."""
    job = _job(request)
    file = _file(request, "sky.yaml")
    command = ("sky", "launch", "--yes", "-c", job_name(job), file)
    text = task(job, SkyOptions(**_taken(request, SkyOptions)))
    _launch(request, Launch("skypilot", file, text, command, "skypilot"))


def _job(request: LaunchRequest) -> ClusterJob:
    return ClusterJob(
        request.script,
        tuple(request.arguments or ()),
        request.name,
        request.nodes,
        request.devices_per_node,
        request.device,
        request.max_restarts,
    )


def _check_recipe(job: ClusterJob) -> None:
    """Check a recipe before it waits in a queue: its fields, its ranks, and its layout.

    Raises:
        MerakError: something in it is wrong. A model in a folder of the cluster is not looked at.
    """
    from merak.cli.recipe.layout_check import check_layout
    from merak.cli.recipe.recipe import read_recipe

    recipe = read_recipe(job.script, job.arguments)
    own, started = recipe.parallel, job.nodes * job.devices_per_node
    if not (recipe.plan == AUTO_PLAN or own.elastic or own.num_ranks == started):
        raise recipe.origins.error(
            ("parallel",),
            f"the recipe's degrees make {counted(own.num_ranks, 'rank')}, but --nodes {job.nodes} "
            f"× --devices-per-node {job.devices_per_node} start {started}; make them equal.",
        )
    model = recipe.model.name
    if os.sep in model and not Path(model).expanduser().exists():
        return  # it is on the cluster
    # Such as tf32, or a package of the model's: this machine need not have what the cluster has.
    with suppress(ArgumentsError, PackageError):
        check_layout(job.script, recipe)


def _taken(request: LaunchRequest, kind: type[Any]) -> dict[str, Any]:
    """The fields of a request that are options of its launcher."""
    own = kind.__dataclass_fields__
    return {name: value for name, value in asdict(request).items() if name in own}


def _file(request: WrittenRequest, suffix: str) -> str:
    return request.output or f"{job_name(_job(request))}.{suffix}"


def _launch(request: LaunchRequest, launch: Launch) -> None:
    if Path(request.script).suffix in RECIPES and Path(request.script).is_file():
        _check_recipe(_job(request))
    if not request.dry_run:
        # Kubernetes has the script in the image.
        if launch.engine != "kubernetes" and not Path(request.script).exists():
            raise CommandError(f"{request.script} does not exist; name a script that does.")
        start(launch)
    command = shlex.join(launch.command)
    report = LaunchReport(launch.engine, launch.file, launch.text, command, not request.dry_run)
    show(report, _page, request.as_json)


def _page(report: LaunchReport) -> str:
    if report.started:
        return f"started: {report.command}"
    written = [] if report.text is None else [f"# {report.file}", report.text.rstrip(), ""]
    return "\n".join([*written, f"$ {report.command}"])
