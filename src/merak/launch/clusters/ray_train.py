"""Ray Train: a driver whose workers each run the script as one rank.

Source: docs.ray.io, `ray.train.torch.TorchTrainer`, which gives every worker RANK, LOCAL_RANK,
WORLD_SIZE, LOCAL_WORLD_SIZE and MASTER_ADDR as torchrun does.
"""

from __future__ import annotations

from string import Template

from merak.launch.clusters.job import ClusterJob, job_name, program

_DRIVER = Template('''\
"""Runs $script on Ray Train; number of workers: $workers."""

import os
import socket
import subprocess
import sys

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

FOLDER = os.getcwd()  # of the script, on a file system that all nodes share
PROGRAM = $program


def one_rank(config):
    """Run the script in a process of its own: Ray calls this function outside the main thread."""
    ports = [None]
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            ports = [free.getsockname()[1]]
    dist.broadcast_object_list(ports)  # Ray's own group already listens at its MASTER_PORT
    environment = {**os.environ, "MASTER_PORT": str(ports[0])}
    code = subprocess.run([sys.executable, *PROGRAM], cwd=FOLDER, env=environment).returncode
    if code != 0:
        raise RuntimeError(f"rank {dist.get_rank()} ended with exit code {code}")


if __name__ == "__main__":
    ray.init()
    TorchTrainer(
        one_rank,
        scaling_config=ScalingConfig(num_workers=$workers, use_gpu=$use_gpu),
        torch_config=TorchConfig(backend="gloo"),  # only for the port above
        run_config=RunConfig(
            name="$name",
            storage_path=os.path.join(FOLDER, "ray_runs"),
            failure_config=FailureConfig(max_failures=$max_failures),
        ),
    ).fit()
''')


def driver(job: ClusterJob) -> str:
    """Return the Python script that starts the job in a Ray cluster.

    Args:
        job: what it runs; Ray chooses the nodes of its nodes × devices_per_node workers.
    """
    return _DRIVER.substitute(
        script=job.script.replace("\\", "/").replace('"', ""),
        program=repr(program(job)),
        workers=job.nodes * job.devices_per_node,
        use_gpu=job.device == "cuda",
        name=job_name(job),
        max_failures=job.max_restarts,
    )
