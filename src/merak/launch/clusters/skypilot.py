"""SkyPilot: a task for nodes of any cloud.

Source: docs.skypilot.co, "Distributed Multi-Node Jobs" (SKYPILOT_NODE_IPS, SKYPILOT_NUM_NODES).
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml

from merak.launch.clusters.job import ClusterJob, job_name, torchrun
from merak.launch.clusters.shell import line

_PORT = 29500
_NODES = "$SKYPILOT_NUM_NODES"
_ENDPOINT = f"$first_node:{_PORT}"


@dataclass(frozen=True, slots=True)
class SkyOptions:
    """Options of SkyPilot.

    Args:
        accelerator: name of the GPU, such as "H100"; unused on the CPU.
        cloud: where to rent; None for the cheapest.
        setup: command that installs what the job needs on every node.
        use_spot: rent devices that may be taken away.
    """

    accelerator: str = "H100"
    cloud: str | None = None
    setup: str = "pip install merak-train"
    use_spot: bool = False


def task(job: ClusterJob, options: SkyOptions) -> str:
    """Return the task for `sky launch`.

    Args:
        job: what it runs.
        options: of the nodes.
    """
    resources: dict[str, object] = {}
    if job.device == "cuda":
        resources["accelerators"] = f"{options.accelerator}:{job.devices_per_node}"
    if options.cloud is not None:
        resources["infra"] = options.cloud
    if options.use_spot:
        resources["use_spot"] = True
    command = torchrun(job, _NODES, _ENDPOINT)
    run = (
        'first_node=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\n'
        'echo "node $SKYPILOT_NODE_RANK of $SKYPILOT_NUM_NODES; all meet at $first_node"\n'
        f"{line(command, (_NODES, _ENDPOINT))}\n"
    )
    written = {
        "name": job_name(job),
        "resources": resources,
        "num_nodes": job.nodes,
        "workdir": ".",
        "setup": options.setup,
        "run": run,
    }
    kept = {key: value for key, value in written.items() if value != {}}
    return yaml.dump(kept, Dumper=_Blocks, sort_keys=False, width=1000)


class _Blocks(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Blocks.add_representer(str, _text)
