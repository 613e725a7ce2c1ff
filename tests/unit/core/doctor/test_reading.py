"""What checks read: the kernel's files of hosts and containers, environments, sockets, tools."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from merak.core.doctor import network, software, torch_build
from merak.core.doctor.cgroup import free_memory, limit, processors
from merak.core.doctor.cpus import read_processors
from merak.core.doctor.finding import Level, System
from merak.core.doctor.folders import check_folders, read_folders
from merak.core.doctor.gpus import Gpu, listed_gpus
from merak.core.doctor.limits import read_limits, read_shared_memory
from merak.core.doctor.memory import Overcommit, read_memory, read_overcommit
from merak.core.doctor.network import Rendezvous, read_host_name, read_interfaces, read_rendezvous
from merak.core.doctor.software import read_software
from merak.core.doctor.torch_build import read_torch

MIB = 2**20


def system(root: Path, files: Mapping[str, str], **environment: str) -> System:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return System(environment, root)


MEMINFO = """MemTotal:        1000 kB
MemAvailable:     600 kB
CommitLimit:      900 kB
Committed_AS:     700 kB
HugePages_Total:     0
"""


def test_memory_of_a_container_of_version_2(tmp_path: Path) -> None:
    own = system(
        tmp_path,
        {
            "proc/meminfo": MEMINFO,
            "proc/sys/vm/overcommit_memory": "2\n",
            "proc/self/cgroup": "0::/job/rank\n",
            "sys/fs/cgroup/job/memory.max": "400000\n",
            "sys/fs/cgroup/job/memory.current": "300000\n",
            "sys/fs/cgroup/job/memory.stat": "anon 1\ninactive_file 50000\n",
            "sys/fs/cgroup/job/rank/memory.max": "max\n",
            "sys/fs/cgroup/job/rank/pids.max": "512\n",
            "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/job/rank/cpu.max": "max 100000\n",
        },
        LOCAL_WORLD_SIZE="4",
        OMP_NUM_THREADS="2",
    )
    found = read_memory(own)
    assert (found.host_bytes, found.available_bytes) == (1024000, 614400)
    assert (found.limit_bytes, found.limit_free_bytes) == (400000, 150000)
    assert found.num_local_ranks == 4
    assert read_overcommit(own) == Overcommit("2", 200 * 1024)
    assert processors(own) == 1.5
    assert limit(own, "pids.max") == 512
    assert (read_limits(own).processes or 0) <= 512
    assert read_processors(own).usable <= 2
    assert (read_processors(own).threads, read_processors(own).num_local_ranks) == ("2", 4)


def test_memory_of_a_container_of_version_1(tmp_path: Path) -> None:
    own = system(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/\n3:memory:/docker/7\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "sys/fs/cgroup/memory/docker/7/memory.limit_in_bytes": "5000",
            "sys/fs/cgroup/memory/docker/7/memory.usage_in_bytes": "4000",
            "sys/fs/cgroup/memory/docker/7/memory.stat": "total_inactive_file 100",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert (limit(own, "memory.max"), free_memory(own)) == (5000, 1100)
    assert processors(own) is None


def test_a_host_without_limits(tmp_path: Path) -> None:
    own = system(tmp_path, {})
    assert (limit(own, "memory.max"), free_memory(own), processors(own)) == (None, None, None)
    assert read_memory(own).host_bytes == 0
    assert read_shared_memory(own).total_bytes is None


def test_gpus_that_the_kernel_knows(tmp_path: Path) -> None:
    own = system(
        tmp_path,
        {
            "dev/nvidia0": "",
            "dev/nvidia1": "",
            "dev/nvidiactl": "",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  "
            "550.54.15  Tue Mar  5\nGCC version:  gcc version 12.2.0\n",
            "sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0\n",
            "sys/class/kfd/kfd/topology/nodes/1/gpu_id": "51234\n",
        },
        CUDA_VISIBLE_DEVICES="",
    )
    found = read_torch(own)
    assert (found.nvidia_gpus, found.amd_gpus, found.nvidia_driver) == (2, 1, "550.54.15")
    assert found.hidden == "CUDA_VISIBLE_DEVICES=''"
    assert "gloo" in found.backends
    opened = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build"
    assert torch_build._nvidia_driver(opened) == "570.86.10"


def test_torchs_own_words_about_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_available() -> bool:
        import warnings

        warnings.warn(
            "CUDA initialization: The NVIDIA driver\non your system is too old", stacklevel=2
        )
        return False

    monkeypatch.setattr(torch_build.torch.cuda, "is_available", is_available)
    found = read_torch(system(tmp_path, {}))
    assert found.reason == "CUDA initialization: The NVIDIA driver on your system is too old"


TABLE = """0, GPU-aaaa, NVIDIA H100 80GB HBM3, 81559, 4, 9.0
1, GPU-bbbb, NVIDIA H100 80GB HBM3, 81559, 5000, 9.0
2, GPU-cccc, NVIDIA H100 80GB HBM3, [N/A], [N/A], 9.0
"""


def test_gpus_of_the_drivers_tool() -> None:
    first = Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, 4 * MIB, "9.0")
    second = Gpu("NVIDIA H100 80GB HBM3", 81559 * MIB, 5000 * MIB, "9.0")
    assert listed_gpus(TABLE, None) == (first, second)
    assert listed_gpus(TABLE, "1") == (second,)
    assert listed_gpus(TABLE, "GPU-aaaa") == (first,)
    assert listed_gpus(TABLE, "") == ()


def test_versions_come_from_the_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read_software(System())
    assert found.ranges["torch"] == ">=2.11"
    assert "mkdocs" not in found.ranges  # an extra
    assert set(found.versions) <= set(found.ranges)
    monkeypatch.setattr(software, "DISTRIBUTION", "merak-that-is-not-there")
    found = read_software(System())
    assert (found.merak, found.ranges) == ("", {})
    assert found.versions["torch"]


def rank(port: int, **others: str) -> System:
    own = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return System({**own, **others})


def test_a_rendezvous_is_tried() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        assert read_rendezvous(rank(port)).answer == "refused"
        listening.listen()
        address = f"127.0.0.1:{port}"
        assert read_rendezvous(rank(port)) == Rendezvous(address)
        agents = rank(port, TORCHELASTIC_USE_AGENT_STORE="True", RANK="0")
        assert read_rendezvous(agents) == Rendezvous(address, is_agents=True)
        assert read_rendezvous(rank(port, RANK="0")) == Rendezvous(address, opens=True)
    assert read_rendezvous(System({})) == Rendezvous("")


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (socket.gaierror(-2, "Name or service not known"), "nameless"),
        (TimeoutError("timed out"), "silent"),
        (OSError(113, "No route to host"), "No route to host"),
    ],
)
def test_a_rendezvous_that_cannot_be_reached(
    error: OSError, answer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(network.socket, "create_connection", fails)
    assert read_rendezvous(rank(1)).answer == answer


def test_the_hosts_name_and_interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    own = System({"GROUP_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": ""})
    found = read_interfaces(own)
    assert found.named == {"GLOO_SOCKET_IFNAME": "eth7"}
    assert found.num_hosts == 2
    assert set(found.addresses) == {name for _, name in socket.if_nameindex()}

    def fails(*_: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(network.socket, "getaddrinfo", fails)
    assert read_host_name(own).reason == "Name or service not known"
    assert read_host_name(own).num_hosts == 2


def test_folders_are_tried(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    own = System(
        {"TMPDIR": str(file), "HF_HOME": str(tmp_path / "not" / "there")},
        trace_cache=str(tmp_path),
    )
    temporary, models, traces = read_folders(own)
    assert temporary.reason == "Not a directory"
    assert (models.reason, models.path) == ("", str(tmp_path / "not" / "there"))
    assert traces.path == str(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["file"]
    assert [one.level for one in check_folders((temporary,))] == [Level.PROBLEM]
    assert len(read_folders(System({}))) == 2
