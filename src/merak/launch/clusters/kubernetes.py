"""Kubernetes: a PyTorchJob of Kubeflow's training operator.

Source: the custom resource `kubeflow.org/v1` PyTorchJob
(github.com/kubeflow/training-operator, manifests/base/crds/kubeflow.org_pytorchjobs.yaml). The
operator gives every pod MASTER_ADDR and MASTER_PORT.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from merak.launch.clusters.job import ClusterJob, job_name, torchrun

_ENDPOINT = "$(MASTER_ADDR):$(MASTER_PORT)"  # which Kubernetes expands in arguments


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """Options of Kubernetes.

    Args:
        image: of the containers, with merak and the script in it.
        namespace: of the job; None for the current one.
        shared_memory: size of /dev/shm, as Kubernetes writes it; ranks and loaders share it.
        save_s: seconds that a pod gets after SIGTERM.
        pod_restarts: how often pods are started again.
        working_dir: of the containers; None for that of the image.
        claim: a persistent volume claim, mounted at /runs, for checkpoints.
    """

    image: str
    namespace: str | None = None
    shared_memory: str = "16Gi"
    save_s: int = 120
    pod_restarts: int = 3
    working_dir: str | None = None
    claim: str | None = None


def manifest(job: ClusterJob, options: KubernetesOptions) -> str:
    """Return the manifest for `kubectl apply`.

    Args:
        job: what it runs.
        options: of its pods.
    """
    replicas = {"Master": _replicas(job, options, 1)}
    if job.nodes > 1:
        replicas["Worker"] = _replicas(job, options, job.nodes - 1)
    metadata = {"name": job_name(job)}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    written = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata,
        "spec": {
            "runPolicy": {"backoffLimit": options.pod_restarts, "cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": replicas,
        },
    }
    return yaml.safe_dump(written, sort_keys=False, width=1000)


def _replicas(job: ClusterJob, options: KubernetesOptions, number: int) -> dict[str, Any]:
    memory = {"medium": "Memory", "sizeLimit": options.shared_memory}
    volumes: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": memory}]
    if options.claim is not None:
        claim = {"claimName": options.claim}
        volumes.append({"name": "runs", "persistentVolumeClaim": claim})
    pod = {
        "terminationGracePeriodSeconds": options.save_s,
        "containers": [_container(job, options)],
        "volumes": volumes,
    }
    return {"replicas": number, "restartPolicy": "OnFailure", "template": {"spec": pod}}


def _container(job: ClusterJob, options: KubernetesOptions) -> dict[str, Any]:
    endpoint = None if job.nodes == 1 else _ENDPOINT
    words = torchrun(job, str(job.nodes), endpoint)
    mounts = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    if options.claim is not None:
        mounts.append({"name": "runs", "mountPath": "/runs"})
    container: dict[str, Any] = {
        "name": "pytorch",  # the operator looks for this name
        "image": options.image,
        "command": words[:1],
        "args": [word if word == endpoint else word.replace("$(", "$$(") for word in words[1:]],
        "volumeMounts": mounts,
    }
    if options.working_dir is not None:
        container["workingDir"] = options.working_dir
    if job.device == "cuda":
        container["resources"] = {"limits": {"nvidia.com/gpu": job.devices_per_node}}
    return container
