"""`merak launch` as a user meets it: what it prints, what it refuses, what it starts."""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from merak.cli.main import main

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import merak
merak.init(2, 1, 1)
rank = dist.get_rank()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
with open(f"rank{rank}", "w") as file:
    file.write(f"{total.item()} of {dist.get_world_size()}: {' '.join(sys.argv[1:])}")
"""


def dry(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["launch", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert not found["started"]
    return found


def program(folder: Path, name: str, text: str) -> None:
    file = folder / name
    file.write_text(f"#!/bin/bash\n{text}", encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)


def environment(folder: Path) -> dict[str, str]:
    """Programs of a folder before all others; torchrun of this environment."""
    path = os.pathsep.join((str(folder), str(Path(sys.executable).parent), os.environ["PATH"]))
    kept = {key: value for key, value in os.environ.items() if key != "RANK"}
    return {**kept, "PATH": path, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) != 0


def slurm_environment(folder: Path) -> dict[str, str]:
    """What Slurm gives a batch script of two nodes, which are both this machine."""
    stubs = folder / "bin"
    stubs.mkdir()
    program(
        stubs,
        "scontrol",
        'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$*" >> "$CALLS"; fi\n',
    )
    program(stubs, "scancel", 'echo "$*" >> "$CALLS"; kill -TERM $(cat "$CALLS.steps")\n')
    start = 'while [[ "$1" == --* ]]; do shift; done\nfor node in 0 1; do\n'
    start += '  SLURM_NODEID=$node SLURM_PROCID=$node "$@" &\n  pids="$pids $!"\ndone\n'
    start += (
        'echo $pids > "$CALLS.steps"\ncode=0\nfor pid in $pids; do wait $pid || code=$?; done\n'
    )
    program(stubs, "srun", start + "exit $code\n")
    port = next(number for number in range(20000 + os.getpid() % 9000, 30000) if is_free(number))
    return {
        **environment(stubs),
        "CALLS": str(folder / "calls"),
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "host[1-2]",
        "SLURM_SUBMIT_DIR": str(folder),
    }


def test_slurm_starts_one_torchrun_for_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = ("--nodes", "2", "--device", "cpu", "--dry-run", "--json", "train.py", "--rate", "1 2")
    found = dry(capsys, "slurm", *words)
    assert found["command"] == "sbatch train.sbatch"
    assert "gpus" not in found["text"]
    done = subprocess.run(
        ["bash", "-c", found["text"]],
        env=slurm_environment(tmp_path),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text(encoding="utf-8") == "3.0 of 2: --rate 1 2"
    assert not (tmp_path / "calls").exists()  # nothing was requeued


def test_slurm_stops_the_steps_and_queues_the_job_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = dry(capsys, "slurm", "--nodes", "2", "--dry-run", "--json", "train.py")
    variables = slurm_environment(tmp_path)
    # A torchrun that ends as the real one does after SIGTERM; the batch script is signalled, as
    # `--signal=B:TERM` asks Slurm to, when both nodes have begun.
    waits = 'trap "echo stopped >> stopped; exit 1" TERM\ntouch begun$SLURM_NODEID\n'
    program(tmp_path / "bin", "torchrun", waits + "while true; do sleep 0.05; done\n")
    batch = subprocess.Popen(["bash", "-c", found["text"]], env=variables)
    try:
        steps = tmp_path / "calls.steps"
        begun = [tmp_path / f"begun{node}" for node in range(2)]
        while not (steps.exists() and all(file.exists() for file in begun)):
            assert batch.poll() is None
            time.sleep(0.01)
        batch.terminate()
        assert batch.wait(60) == 1
    finally:
        batch.kill()
    number = variables["SLURM_JOB_ID"]
    calls = (tmp_path / "calls").read_text(encoding="utf-8").splitlines()
    assert calls == [f"--signal=TERM {number}", f"requeue {number}"]
    assert (tmp_path / "stopped").read_text(encoding="utf-8") == "stopped\n" * 2


def test_slurm_settings(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "4", "--devices-per-node", "8", "--time", "12:00:00", "--partition", "gpu")
    own = ("--account", "lab", "--cpus-per-device", "3", "--dry-run", "--json", "a/My job.yaml")
    text = dry(capsys, "slurm", *words, *own)["text"]
    lines = {line.removeprefix("#SBATCH --") for line in text.splitlines() if "#SBATCH" in line}
    assert lines == {
        *("job-name=my-job", "nodes=4", "ntasks-per-node=1", "gpus-per-node=8", "cpus-per-task=24"),
        *("time=12:00:00", "partition=gpu", "account=lab", "output=%x-%j.log", "open-mode=append"),
        *("signal=B:TERM@120", "requeue"),
    }
    assert "--nproc-per-node 8" in text
    assert "-m merak.cli.main train 'a/My job.yaml' --resume" in text


def test_kubernetes_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--image", "registry/merak", "--nodes", "3", "--devices-per-node", "8")
    own = ("--namespace", "lab", "--claim", "disk", "--dry-run", "--json", "train.py", "$(HOME)")
    found = dry(capsys, "kubernetes", *words, *own)
    job = yaml.safe_load(found["text"])
    check(job, PYTORCH_JOB, "job")
    assert found["command"] == "kubectl apply -f train.pytorchjob.yaml"
    assert job["metadata"] == {"name": "train", "namespace": "lab"}
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert {kind: one["replicas"] for kind, one in replicas.items()} == {"Master": 1, "Worker": 2}
    for one in replicas.values():
        pod = one["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/dev/shm", "/runs"}
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"
        assert "$(MASTER_ADDR):$(MASTER_PORT)" in container["args"]
        assert container["args"][-2:] == ["train.py", "$$(HOME)"]  # which Kubernetes leaves alone


def test_skypilot_task(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "2", "--devices-per-node", "8", "--accelerator", "A100", "--spot")
    found = dry(capsys, "skypilot", *words, "--dry-run", "--json", "train.py", "--text", "a b")
    task = yaml.safe_load(found["text"])
    assert task["resources"] == {"accelerators": "A100:8", "use_spot": True}
    assert task["num_nodes"] == 2
    printed = subprocess.run(
        ["bash", "-c", f'torchrun() {{ printf "%s\\n" "$@"; }}\n{task["run"]}'],
        env={"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2",
             "SKYPILOT_NODE_RANK": "1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    assert printed[0] == "node 1 of 2; all meet at 10.0.0.1"
    assert printed[1:3] == ["--nnodes", "2"]
    assert "10.0.0.1:29500" in printed
    assert printed[-3:] == ["train.py", "--text", "a b"]


def test_ray_driver(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--nodes", "2", "--devices-per-node", "4", "--dry-run", "--json", "train.py", "--x")
    found = dry(capsys, "ray", *words)
    compile(found["text"], "driver", "exec")
    assert "PROGRAM = ['train.py', '--x']" in found["text"]
    assert "num_workers=8, use_gpu=True" in found["text"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed (merak-train[ray])")
def test_ray_runs_the_script_on_its_workers(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    words = ["--devices-per-node", "2", "--device", "cpu", "train.py", "--rate", "1"]
    subprocess.run(
        [sys.executable, "-m", "merak.cli.main", "launch", "ray", *words],
        cwd=tmp_path,
        env=environment(tmp_path),
        check=True,
        timeout=300,
    )
    for rank in range(2):
        assert (tmp_path / f"rank{rank}").read_text(encoding="utf-8") == "3.0 of 2: --rate 1"


def test_torchrun(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("torchrun", "--devices-per-node", "8", "--max-restarts", "3", "--dry-run", "--json")
    command = "torchrun --nnodes 1 --nproc-per-node 8 --standalone --max-restarts 3 "
    assert dry(capsys, *words, "train.py", "--json")["command"] == command + "train.py --json"
    resumed = "-m merak.cli.main train job.yaml --resume"
    assert dry(capsys, *words, "job.yaml")["command"] == command + resumed


def test_run_starts_the_ranks_of_the_degrees(tmp_path: Path) -> None:
    """The script leaves the degrees out; with more ranks than tp needs, there are replicas."""
    script = SCRIPT.replace("merak.init(2, 1, 1)", 'mesh = merak.init(device="cpu")')
    script += (
        "    file.write(f' {mesh.dp} {mesh.tp} {mesh.pp}')\nsys.exit('no' if rank == 3 else 0)\n"
    )
    (tmp_path / "train.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "-m", "merak.cli.main", "run", "--tp", "2"]
    for more, place in (((), "1 2 1"), (("--nproc-per-node", "4"), "2 2 1")):
        done = subprocess.run(
            [*command, *more, "train.py", "--tp", "7"],
            env=environment(tmp_path),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == bool(more), done.stderr
        size = 2 * int(place[0])
        total = sum(range(size + 1))
        for rank in range(size):
            found = (tmp_path / f"rank{rank}").read_text(encoding="utf-8")
            assert found == f"{total:.1f} of {size}: --tp 7 {place}"
    last = done.stderr.strip().splitlines()[-1]
    said = "rank 3 of this machine ended with exit code 1; what it has printed is above."
    assert last == f"merak: {said}"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--tp 0 train.py", "tp=0 is not a degree; use a whole number of 1 or more."),
        ("--tp two train.py", "argument --tp: invalid int value: 'two'; see merak run --help."),
        ("--tensor 2 train.py", "unrecognized arguments: --tensor; see merak run --help."),
        ("other.py", "other.py does not exist; name a script that does."),
        ("--nnodes 2 --pp 4 train.py", "--nnodes 2 needs --nproc-per-node, the ranks of each host"),
        ("--plan auto train.py", "--plan auto needs --nproc-per-node, the ranks that the plan is"),
        ("--plan no.json train.py", "no.json cannot be read (No such file or directory)"),
    ],
)
def test_what_cannot_be_run(
    words: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    assert main(["run", *words.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_without_dry_run_the_file_is_written_and_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program(tmp_path, "sbatch", 'echo "queued $1"; exit $CODE\n')
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CODE", "0")
    assert main(["launch", "slurm", "--json", "train.py"]) == 0
    said = capfd.readouterr()
    assert json.loads(said.out)["started"]
    assert said.err == "queued train.sbatch\n"
    assert (tmp_path / "train.sbatch").read_text(encoding="utf-8").startswith("#!/bin/bash\n")
    monkeypatch.setenv("CODE", "3")
    assert main(["launch", "slurm", "train.py"]) == 1
    assert "sbatch ended with exit code 3" in capfd.readouterr().err
    assert main(["launch", "slurm", "--nodes", "2", "train.py"]) == 2
    assert "train.sbatch exists and holds something else" in capfd.readouterr().err


EXPERTS = (
    "model.name=MixtralForCausalLM",
    "model.config={num_hidden_layers: 2, hidden_size: 16, intermediate_size: 32, "
    "num_attention_heads: 2, num_key_value_heads: 2, num_local_experts: 4}",
)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["slurm", "train.py"], "needs the program sbatch, which is not on the path; install"),
        (["kubernetes", "--image", "i", "train.py"], "needs the program kubectl"),
        (["skypilot", "train.py"], "needs the program sky, which is not on the path; install sky"),
        (["slurm", "other.py"], "other.py does not exist"),
        (["slurm", "train.sh"], "train.sh is no script that can be launched; give a .py file"),
        (["slurm", "--nodes", "0", "train.py"], "--nodes 0 is too few; use 1 or more."),
        (["slurm", "--name", "A b", "train.py"], "--name A b is no name that every launcher"),
        (["slurm", "--time", "1\n2", "train.py"], "is not one word, as sbatch takes it"),
        (["slurm", "--time", "noon", "train.py"], "--time noon is no time limit of Slurm's; give"),
        (["slurm", "job.yaml", "data.seqence=1"], "data.seqence=1: data has no field 'seqence'"),
        (
            ["slurm", "--nodes", "2", "job.yaml"],
            "job.yaml:2:1: the recipe's degrees make 1 rank, but --nodes 2 × --devices-per-node 1 "
            "start 2; make them equal.",
        ),
        (["slurm", "--nodes", "2", "job.yaml", "parallel.dp=2"], "needs the program sbatch"),
        (["slurm", "--nodes", "2", "job.yaml", "plan=auto"], "needs the program sbatch"),
        (
            ["slurm", "--nodes", "3", "job.yaml", *EXPERTS, "parallel.dp=3", "parallel.ep=3"],
            "parallel.ep=3: ep=3 does not divide the number of experts of model.layers.0.mlp.exper",
        ),
        (
            ["slurm", "--nodes", "2", "job.yaml", "model.name=/cluster/model", "parallel.pp=2"],
            "needs the program sbatch",
        ),
        (
            ["slurm", "--nodes", "2", "job.yaml", "arguments.tf32=true", "parallel.pp=2"],
            "needs the program sbatch",
        ),
        (["slurm", "--device", "tpu", "train.py"], "--device tpu is no device; use cuda or cpu."),
        (["torchrun", "--nodes", "2", "train.py"], "--nodes 2 needs --rdzv-endpoint HOST:PORT"),
    ],
)
def test_what_cannot_be_launched(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    sentence: str,
) -> None:
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    recipe = "model: {name: GPT2LMHeadModel}\nparallel: {}\narguments: {output_dir: runs}\n"
    (tmp_path / "job.yaml").write_text(recipe, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert main(["launch", *words]) == 2
    assert sentence in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {"train.py", "job.yaml"}


# The fields of a PyTorchJob that Merak writes, with their types, as a list written by hand; the
# operator's whole schema is github.com/kubeflow/training-operator,
# manifests/base/crds/kubeflow.org_pytorchjobs.yaml. A field that is not here is refused.
_CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "args": [str],
    "workingDir": str,
    "volumeMounts": [{"name": str, "mountPath": str}],
    "resources": {"limits": {"nvidia.com/gpu": int}},
}
_VOLUME = {
    "name": str,
    "emptyDir": {"medium": str, "sizeLimit": str},
    "persistentVolumeClaim": {"claimName": str},
}
_POD = {"terminationGracePeriodSeconds": int, "containers": [_CONTAINER], "volumes": [_VOLUME]}
_REPLICAS = {"replicas": int, "restartPolicy": str, "template": {"spec": _POD}}
PYTORCH_JOB = {
    "apiVersion": str,
    "kind": str,
    "metadata": {"name": str, "namespace": str},
    "spec": {
        "runPolicy": {"backoffLimit": int, "cleanPodPolicy": str},
        "pytorchReplicaSpecs": {"Master": _REPLICAS, "Worker": _REPLICAS},
    },
}


def check(value: object, schema: Any, where: str) -> None:
    """Compare a value with a schema of dicts, one-element lists and types."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        for key, part in value.items():
            assert key in schema, f"{where}.{key}"
            check(part, schema[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for part in value:
            check(part, schema[0], where)
    else:
        assert type(value) is schema, where
