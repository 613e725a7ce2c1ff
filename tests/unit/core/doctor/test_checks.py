"""Checks of one host: each bad state gives its sentence and what to do, each good one is ok."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from merak.core.doctor.checks import CHECKS, host_findings
from merak.core.doctor.compiler import Toolchain, check_compiler, check_triton
from merak.core.doctor.cpus import Processors, check_processors
from merak.core.doctor.finding import Check, Judgement, Level, System
from merak.core.doctor.folders import Folder, check_folders
from merak.core.doctor.gpus import Gpu, Gpus, check_gpus
from merak.core.doctor.limits import (
    Limits,
    SharedMemory,
    check_locked_memory,
    check_open_files,
    check_processes,
    check_shared_memory,
)
from merak.core.doctor.memory import Memory, Overcommit, check_memory, check_overcommit
from merak.core.doctor.network import (
    HostName,
    Interfaces,
    Rendezvous,
    check_host_name,
    check_interfaces,
    check_rendezvous,
)
from merak.core.doctor.software import Software, check_packages, check_python
from merak.core.doctor.torch_build import TorchBuild, check_backends, check_torch
from merak.core.doctor.variables import check_variables

GB = 10**9
OK, WARNING, PROBLEM = Level.OK, Level.WARNING, Level.PROBLEM

PACKAGES = Software("0.1.0", "3.11.7", ">=3.11", {"torch": "2.13.0+cpu"}, {"torch": ">=2.11"})
CUDA = TorchBuild("2.13.0", "cuda", "12.8", backends=("gloo", "nccl"), nccl="2.27.3")
GPUS = replace(CUDA, nvidia_gpus=8, nvidia_driver="550.54")
H100 = Gpu("H100", 80 * GB, 0, "9.0")
NETWORK = {"lo": ("127.0.0.1",), "eth0": ("192.0.2.2",), "ib0": ()}
MEMORY = Memory(512 * GB, 400 * GB)
TOOLS = Toolchain("", "/usr/bin/g++", "/usr/include/python3.11", True)
TEMPORARY = Folder("temporary files", "/tmp", "", 50 * GB, GB, "let TMPDIR name one", PROBLEM)
PLACE = {"WORLD_SIZE": "2", "MASTER_ADDR": "host-a", "MASTER_PORT": "29500"}

Case = tuple[Callable[[Any], Iterator[Judgement]], Any, Level, str, str]

CASES: list[Case] = [
    # A check, the state, how bad it is, parts of what was found and of what to do.
    (check_python, PACKAGES, OK, "Python 3.11.7", ""),
    (check_python, replace(PACKAGES, python="3.10.2"), PROBLEM, "3.10.2, but", ">=3.11"),
    (check_packages, PACKAGES, OK, "Merak 0.1.0 with torch 2.13.0+cpu", ""),
    (check_packages, replace(PACKAGES, versions={"torch": "2.9.1"}), PROBLEM,
     "torch 2.9.1, but Merak 0.1.0 needs >=2.11", "pip install 'torch>=2.11'"),
    (check_packages, replace(PACKAGES, versions={}), PROBLEM,
     "torch is not installed", "pip install 'torch>=2.11'"),
    (check_packages, replace(PACKAGES, merak=""), WARNING, "not installed", "pip install -e ."),
    (check_torch, TorchBuild("2.13.0+cpu"), OK, "the host has no GPU", ""),
    (check_torch, CUDA, OK, "for CUDA 12.8; the host has no GPU", ""),
    (check_torch, replace(GPUS, num_usable=8), OK, "8 GPUs, driver 550.54, NCCL 2.27.3", ""),
    (check_torch, TorchBuild("2.13.0+cpu", nvidia_gpus=1), PROBLEM,
     "is a CPU build, but the host has 1 NVIDIA GPU", "install torch for CUDA"),
    (check_torch, TorchBuild("2.13.0+cpu", amd_gpus=4), PROBLEM,
     "the host has 4 AMD GPUs", "install torch for ROCm"),
    (check_torch, replace(CUDA, amd_gpus=4), PROBLEM, "is a build for cuda", "for ROCm"),
    (check_torch, replace(GPUS, reason="The NVIDIA driver on your system is too old (found 11040)"),
     PROBLEM, "needs a newer driver than 550.54", "update the driver"),
    (check_torch, GPUS, PROBLEM, "can use none of the 8 NVIDIA GPUs", "nvidia-smi"),
    (check_torch, replace(GPUS, hidden="CUDA_VISIBLE_DEVICES=''"), PROBLEM,
     "CUDA_VISIBLE_DEVICES='' hides the 8 NVIDIA GPUs", "unset CUDA_VISIBLE_DEVICES"),
    (check_torch, replace(GPUS, nvidia_gpus=0), PROBLEM,
     "550.54 is loaded, but no GPU is visible", "--gpus all"),
    (check_backends, CUDA, OK, "gloo and nccl", ""),
    (check_backends, replace(CUDA, backends=()), PROBLEM, "without torch.distributed", "install"),
    (check_backends, replace(CUDA, backends=("nccl",)), PROBLEM, "without gloo", "install"),
    (check_backends, replace(GPUS, num_usable=8, backends=("gloo",)), PROBLEM,
     "without NCCL", "--backend gloo"),
    (check_gpus, Gpus(()), OK, "no GPU", ""),
    (check_gpus, Gpus((H100, H100), ("sm_90",)), OK, "2 × H100 (80.0 GB)", ""),
    (check_gpus, Gpus((H100, Gpu("A100", 40 * GB, 0))), WARNING, "of different kinds: 1 × H100",
     "CUDA_VISIBLE_DEVICES"),
    (check_gpus, Gpus((H100, replace(H100, used_bytes=5 * GB))), WARNING,
     "5.0 GB of the 80.0 GB of GPU 1 are in use", "nvidia-smi"),
    (check_gpus, Gpus((replace(H100, used_bytes=70 * GB),)), PROBLEM, "70.0 GB of the", "end them"),
    (check_gpus, Gpus((Gpu("GTX 1080", 8 * GB, 0, "6.1"),), ("sm_70", "sm_90", "compute_90")),
     PROBLEM, "no kernels for GTX 1080 (compute capability 6.1", "build of torch"),
    (check_gpus, Gpus((Gpu("RTX 3090", 24 * GB, 0, "8.6"),), ("sm_80",)), OK, "RTX 3090", ""),
    (check_gpus, Gpus((Gpu("B200", 180 * GB, 0, "10.0"),), ("sm_90a", "compute_90")), OK, "B2", ""),
    (check_host_name, HostName("node7", "192.0.2.2"), OK, "node7 has the address 192.0.2.2", ""),
    (check_host_name, HostName("node7", "127.0.1.1"), OK, "node7", ""),
    (check_host_name, HostName("node7", "127.0.1.1", num_hosts=2), WARNING,
     "node7 resolves to 127.0.1.1", "/etc/hosts"),
    (check_host_name, HostName("node7", "", "Name or service not known"), WARNING,
     "node7 has no address (Name or service not known)", "/etc/hosts"),
    (check_interfaces, Interfaces(NETWORK), OK, "lo (127.0.0.1), eth0 (192.0.2.2)", ""),
    (check_interfaces, Interfaces(NETWORK, {"GLOO_SOCKET_IFNAME": "eth7"}), PROBLEM,
     "GLOO_SOCKET_IFNAME=eth7 names an interface that this host does not have", "eth0 (192.0.2.2)"),
    (check_interfaces, Interfaces(NETWORK, {"GLOO_SOCKET_IFNAME": "ib0"}), PROBLEM,
     "without an address", "eth0"),
    (check_interfaces, Interfaces(NETWORK, {"GLOO_SOCKET_IFNAME": "lo"}), OK, "lo", ""),
    (check_interfaces, Interfaces(NETWORK, {"GLOO_SOCKET_IFNAME": "lo"}, 2), PROBLEM,
     "only this host reaches, but the job has 2 hosts", "unset it"),
    (check_interfaces, Interfaces(NETWORK, {"NCCL_SOCKET_IFNAME": "eth"}, 2), OK, "eth0", ""),
    (check_interfaces, Interfaces(NETWORK, {"NCCL_SOCKET_IFNAME": "^lo,ib"}, 2), OK, "eth0", ""),
    (check_interfaces, Interfaces(NETWORK, {"NCCL_SOCKET_IFNAME": "^eth,ib"}, 2), PROBLEM,
     "only this host reaches", "unset it"),
    (check_interfaces, Interfaces(NETWORK, {"NCCL_SOCKET_IFNAME": "=eth"}), PROBLEM,
     "does not have", "unset it"),
    (check_interfaces, Interfaces({"lo": ("127.0.0.1",)}, {}, 2), PROBLEM,
     "the job has 2 hosts, but this one has no network", "--network host"),
    (check_rendezvous, Rendezvous(""), OK, "no rank of a job", ""),
    (check_rendezvous, Rendezvous("a:1"), OK, "a:1 answers", ""),
    (check_rendezvous, Rendezvous("a:1", opens=True), OK, "opens the job's store at a:1", ""),
    (check_rendezvous, Rendezvous("a:1", answer="nameless"), PROBLEM, "no address", "every host"),
    (check_rendezvous, Rendezvous("a:1", answer="silent"), PROBLEM,
     "behind a firewall", "nc -vz a 1"),
    (check_rendezvous, Rendezvous("a:1", answer="refused"), WARNING, "nobody listens", "rank 0"),
    (check_rendezvous, Rendezvous("a:1", answer="refused", is_agents=True), PROBLEM,
     "nobody listens there", "torchrun sets them"),
    (check_rendezvous, Rendezvous("a:1", answer="No route to host"), PROBLEM,
     "cannot be reached: No route to host", "MASTER_ADDR"),
    (check_open_files, Limits(), OK, "unlimited", ""),
    (check_open_files, Limits(open_files=1024), OK, "1,024 open files", ""),
    (check_open_files, Limits(open_files=1024, num_ranks=512), WARNING,
     "job of 512 ranks", "ulimit -n"),
    (check_open_files, Limits(open_files=128), PROBLEM, "128 open files are too few", "ulimit -n"),
    (check_processes, Limits(), OK, "unlimited", ""),
    (check_processes, Limits(processes=1000), WARNING, "1,000 processes", "ulimit -u"),
    (check_processes, Limits(processes=100), PROBLEM, "too few", "--pids-limit"),
    (check_processes, Limits(address_bytes=8 * GB), WARNING, "limited to 8.0 GB", "ulimit -v"),
    (check_locked_memory, Limits(locked_bytes=65536), OK, "no InfiniBand", ""),
    (check_locked_memory, Limits(infiniband=("mlx5_0",)), OK, "unlimited", ""),
    (check_locked_memory, Limits(locked_bytes=65536, infiniband=("mlx5_0",)), WARNING,
     "65.5 kB of locked memory, but NCCL locks its buffers for InfiniBand (mlx5_0)", "ulimit -l"),
    (check_shared_memory, SharedMemory(64 * GB, 60 * GB), OK, "60.0 GB of 64.0 GB are free", ""),
    (check_shared_memory, SharedMemory(64 * 2**20, 60 * 2**20), WARNING,
     "Docker's default", "--shm-size"),
    (check_shared_memory, SharedMemory(64 * GB, 2**20), PROBLEM, "1.0 MB of 64.0 GB", "ended jobs"),
    (check_shared_memory, SharedMemory(None), WARNING, "no /dev/shm", "--ipc=host"),
    (check_memory, MEMORY, OK, "400.0 GB are free, on a host with 512.0 GB", ""),
    (check_memory, Memory(0, 0), OK, "unknown", ""),
    (check_memory, replace(MEMORY, num_local_ranks=256), WARNING,
     "256 ranks of this host", "fewer ranks"),
    (check_memory, replace(MEMORY, limit_bytes=8 * GB, limit_free_bytes=GB), WARNING,
     "1.0 GB are free, of the 8.0 GB that the container may have, on a host with 512.0 GB",
     "raise the limit of the container"),
    (check_memory, replace(MEMORY, available_bytes=GB // 10), PROBLEM, "100.0 MB are free", "end"),
    (check_overcommit, Overcommit("0"), OK, "vm.overcommit_memory=0", ""),
    (check_overcommit, Overcommit("2", 100 * GB), WARNING, "more than 100.0 GB", "sysctl"),
    (check_overcommit, Overcommit("2", GB), PROBLEM, "more than 1.0 GB", "sysctl"),
    (check_processors, Processors(8, 8), OK, "8 processors", ""),
    (check_processors, Processors(64, 8, threads="8", num_local_ranks=8), OK, "bound to them", ""),
    (check_processors, Processors(64, 64, quota=3.5), OK, "4 processors of the host's 64", ""),
    (check_processors, Processors(8, 8, threads="8", num_local_ranks=4), WARNING,
     "OMP_NUM_THREADS=8 for each of 4 ranks, but 8 processors", "set OMP_NUM_THREADS=2"),
    (check_processors, Processors(64, 2, threads="4"), WARNING, "but 2 processors", "THREADS=2"),
    (check_processors, Processors(4, 4, num_local_ranks=8), WARNING,
     "4 processors for 8 ranks", "at most"),
    (check_processors, Processors(8, 8, threads="many"), WARNING, "=many is no number", "unset it"),
    (check_compiler, TOOLS, OK, "/usr/bin/g++", ""),
    (check_compiler, replace(TOOLS, path=""), WARNING, "no C++ compiler", "install g++"),
    (check_compiler, replace(TOOLS, path="", named="icpx"), WARNING, "CXX=icpx is not", "CXX"),
    (check_compiler, replace(TOOLS, has_headers=False), WARNING, "no Python.h", "python3-dev"),
    (check_triton, TOOLS, OK, "not needed", ""),
    (check_triton, replace(TOOLS, triton="3.5.0", has_gpus=True), OK, "Triton 3.5.0", ""),
    (check_triton, replace(TOOLS, has_gpus=True), WARNING, "not installed", "pip install triton"),
    (check_folders, (TEMPORARY,), OK, "/tmp (temporary files) 50.0 GB free", ""),
    (check_folders, (replace(TEMPORARY, reason="Read-only file system"),), PROBLEM,
     "/tmp (temporary files) cannot be written: Read-only file system", "TMPDIR"),
    (check_folders, (replace(TEMPORARY, free_bytes=10**6),), WARNING, "has 1.0 MB free", "remove"),
    (check_variables, {"NCCL_DEBUG": "WARN", "HF_HUB_OFFLINE": "0"}, OK, "none that breaks", ""),
    (check_variables, {"CUDA_LAUNCH_BLOCKING": "1"}, WARNING, "CUDA_LAUNCH_BLOCKING=1: ", "unset"),
    (check_variables, {"NCCL_DEBUG": "info"}, WARNING, "every rank prints", "WARN"),
    (check_variables, {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, WARNING, "slow", "unset"),
    (check_variables, {"HF_HUB_OFFLINE": "1"}, WARNING, "nothing is downloaded", "unset"),
    (check_variables, {"NCCL_P2P_DISABLE": "1"}, WARNING, "does not use NVLink", "unset"),
    (check_variables, {"ACCELERATE_USE_FSDP": "true"}, WARNING, "own FSDP", "torchrun"),
    (check_variables, {"RANK": "0"}, PROBLEM,
     "WORLD_SIZE and MASTER_ADDR and MASTER_PORT not", "unset"),
    (check_variables, {"RANK": "0", **PLACE}, WARNING, "not by torchrun or Slurm", "left over"),
    (check_variables, {"RANK": "0", "TORCHELASTIC_RUN_ID": "7", **PLACE}, OK, "none", ""),
    (check_variables, {"WORLD_SIZE": "8"}, PROBLEM, "WORLD_SIZE=8 is set without RANK", "unset"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "state", "level", "found", "fix"), CASES)
def test_a_state_gives_its_sentence(
    check: Callable[[Any], Iterator[Judgement]], state: Any, level: Level, found: str, fix: str
) -> None:
    judged = list(check(state))
    assert [one.level for one in judged] == [level]
    assert found in judged[0].found
    assert fix in judged[0].fix
    assert bool(judged[0].fix) == (level is not OK)
    # Both are shown as parts of sentences.
    assert not judged[0].found.endswith(".")
    assert not judged[0].fix.endswith(".") or judged[0].fix.endswith("-e .`")


def test_every_check_has_a_bad_case_and_a_good_one() -> None:
    judges = {check.judge for check in CHECKS}
    assert {case[0] for case in CASES if case[2] is OK} == judges
    assert {case[0] for case in CASES if case[2] is not OK} == judges


def test_several_faults_are_named_each() -> None:
    wrong = {"torch": "2.9", "datasets": "3.0"}
    ranges = {"torch": ">=2.11", "datasets": ">=4.0"}
    judged = list(check_packages(replace(PACKAGES, versions=wrong, ranges=ranges)))
    assert [one.fix for one in judged] == [
        "pip install 'torch>=2.11'",
        "pip install 'datasets>=4.0'",
    ]


def test_a_check_that_fails_is_a_warning() -> None:
    def read(system: System) -> str:
        raise OSError("the disk is on fire")

    found = Check("folders", read, lambda fact: iter(())).findings(System())
    assert [(one.name, one.level, one.ok) for one in found] == [("folders", WARNING, True)]
    assert found[0].found == "could not be checked (OSError: the disk is on fire)"


def test_every_check_runs_here() -> None:
    found = host_findings(System())
    assert [*dict.fromkeys(one.name for one in found)] == [check.name for check in CHECKS]
    assert not [one.found for one in found if one.found.startswith("could not be checked")]
