"""Slurm: a batch script with one torchrun for each node.

Source: man pages of sbatch (--signal, --requeue), srun, scancel (--signal goes to the job's steps
and not to the batch script) and scontrol (show hostnames, requeue).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from string import Template

from merak.core.errors import CommandError
from merak.launch.clusters.job import ClusterJob, job_name, torchrun
from merak.launch.clusters.shell import line

_NODES = "$SLURM_JOB_NUM_NODES"
_ENDPOINT = "$first_node:$port"

_TIME = re.compile(r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}|infinite|unlimited", re.IGNORECASE)

_SCRIPT = Template("""\
#!/bin/bash
$settings
set -u
cd "$$SLURM_SUBMIT_DIR"

# torchrun's processes of all nodes meet at the first node, at a port of this job's own.
first_node=$$(scontrol show hostnames "$$SLURM_JOB_NODELIST" | head -n 1)
port=$$((20000 + SLURM_JOB_ID % 10000))

# Before the time is over, or when the job is preempted: all ranks save a checkpoint and end; then
# the job is queued again.
stopping=no
trap 'stopping=yes; scancel --signal=TERM "$$SLURM_JOB_ID"' TERM

srun --ntasks="$$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --kill-on-bad-exit=1 \\
    $torchrun &
step=$$!
wait "$$step"
code=$$?
if [ "$$stopping" = yes ]; then
    wait "$$step"
    code=$$?
    if [ "$$code" -ne 0 ]; then # else the training has ended in time
        scontrol requeue "$$SLURM_JOB_ID"
    fi
fi
exit "$$code"
""")


@dataclass(frozen=True, slots=True)
class SlurmOptions:
    """Options of Slurm.

    Args:
        time: the limit, as sbatch takes it, such as "12:00:00"; None for that of the partition.
        partition: where the job is queued.
        account: that pays.
        cpus_per_device: processor cores for each rank.
        save_s: seconds before the end at which ranks save.
    """

    time: str | None = None
    partition: str | None = None
    account: str | None = None
    cpus_per_device: int | None = None
    save_s: int = 120

    def __post_init__(self) -> None:
        if self.save_s < 1:
            raise CommandError(f"--save-seconds {self.save_s} is too few; use 1 or more.")
        if self.cpus_per_device is not None and self.cpus_per_device < 1:
            raise CommandError(
                f"--cpus-per-device {self.cpus_per_device} is too few; use 1 or more."
            )
        for flag, value in (
            ("--time", self.time),
            ("--partition", self.partition),
            ("--account", self.account),
        ):
            if value is not None and len(value.split()) != 1:
                raise CommandError(f"{flag} {value!r} is not one word, as sbatch takes it.")
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise CommandError(
                f"--time {self.time} is no time limit of Slurm's; give minutes, or "
                "DAYS-HOURS:MINUTES:SECONDS or a part of it, such as 12:00:00."
            )


def batch_script(job: ClusterJob, options: SlurmOptions) -> str:
    """Return the script for `sbatch`.

    Args:
        job: what it runs.
        options: of the queue.
    """
    cores = options.cpus_per_device and options.cpus_per_device * job.devices_per_node
    settings = {
        "job-name": job_name(job),
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.devices_per_node if job.device == "cuda" else None,
        "cpus-per-task": cores,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"B:TERM@{options.save_s}",
    }
    lines = [f"#SBATCH --{key}={value}" for key, value in settings.items() if value is not None]
    command = torchrun(job, _NODES, _ENDPOINT)
    return _SCRIPT.substitute(
        settings="\n".join([*lines, "#SBATCH --requeue"]),
        torchrun=line(command, (_NODES, _ENDPOINT)),
    )
