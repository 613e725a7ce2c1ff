"""Library of data sheets: peaks of GPUs and of the links between them, each with its source.

FLOPs are those of dense matrix products. Makers also print twice as many for structured sparsity
(NVIDIA: "with sparsity"), which training does not use. Bandwidths are in 10^9 bytes per second;
those of links are of one direction, while makers print the sum of both. Memory is what torch can
allocate from: makers' gigabytes are 2^30 bytes on some devices and 10^9 on others, and drivers
keep 1 to 2 % of them, or 8 % for error correction. The figures are those of torch's own messages
("GPU 0 has a total capacity of …"), as public reports of each device quote them.

Figures were compared with tables that cite the makers' pages: "Machine Learning Engineering"
(S. Bekman, https://github.com/stas00/ml-engineering, compute/accelerator and network), and for
V100, T4, A10, RTX 3090 and 4090 and B200 with lists of GPUs (https://sysrqmts.com,
https://hmc-tech.com, https://waredb.com). A source that ends in "not compared" is from memory of
the named document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from merak.plan.cost.efficiency import Efficiency


@dataclass(frozen=True, slots=True)
class LinkSheet:
    """Link between devices, or of a device to its host.

    Args:
        gigabytes_per_s: in one direction, of all lanes of a device together.
        fraction: of the bandwidth that large messages achieve.
        latency_s: seconds of one step of a ring.
        source: of the bandwidth.
        start_s: seconds that a collective takes beyond its steps.
        protocols: ways to send small messages faster, as factors of latency and bandwidth.
        switch_fraction: rate of reductions inside the switch ÷ the achieved bandwidth; 0 for none.
        channels: of a communicator over it; 0 where `merak.plan.memory.non_tensor` has more to say.
    """

    gigabytes_per_s: float
    fraction: float
    latency_s: float
    source: str
    start_s: float = 0.0
    protocols: tuple[tuple[float, float], ...] = ()
    switch_fraction: float = 0.0
    channels: int = 0

    @property
    def communicator_bytes(self) -> int | None:
        """Buffers of a communicator over this link alone; None where it says too little."""
        return self.channels * CONNECTION_BYTES or None


CONNECTION_BYTES = 4 * 2**20 + 8 * 512 * 8 * 16 + 8 * 120 * 640 * 8
"""Buffers of one of NCCL's channels for one peer: of its protocols Simple (NCCL_BUFFSIZE), LL and
LL128, eight steps each. Source: NCCL, src/include/device.h and src/init.cc."""

_PCIE_CHANNELS = 2
"""As NCCL logs them on eight RTX 4090s, https://github.com/NVIDIA/nccl-tests/issues/307."""


@dataclass(frozen=True, slots=True)
class DataSheet:
    """Peaks of a GPU: dense matrix products, without structured sparsity.

    Args:
        teraflops: by element type, accumulating in float32; float32 without TF32, which has the
            name "tfloat32".
        memory_gibibytes: that programs may allocate, which is less than the maker's gigabytes.
        memory_gigabytes_per_s: of that memory.
        multiprocessors: that compute tiles of a product; 0 where their number does not matter.
        link: name of the link to the other devices of its node, one of `LINKS`.
        host_link: name of the link to the host.
        network: name of the link of one network adapter, as nodes usually have it.
        devices_per_adapter: devices that usually share one.
        generation: whose operators it runs, one of `GENERATIONS`.
        source: the maker's document with these figures.
    """

    teraflops: Mapping[str, float]
    memory_gibibytes: float
    memory_gigabytes_per_s: float
    multiprocessors: int
    link: str
    host_link: str
    network: str
    devices_per_adapter: int
    generation: str
    source: str

    @property
    def efficiency(self) -> Efficiency:
        """Fractions of its peak rates that operators of the device achieve."""
        return GENERATIONS[self.generation]

    @property
    def host_gigabytes_per_s(self) -> float:
        """Bandwidth of the link to the host, in one direction."""
        return LINKS[self.host_link].gigabytes_per_s


# Steps of a ring with NCCL's protocol "Simple", seconds before the first, and its other protocols:
# "LL" at a fifth of the latency and half of the bandwidth, "LL128" at 0.56 and 0.92.
# Source: hwLatencies, baseLatencies and the refinements below them in src/graph/tuning.cc,
# https://github.com/NVIDIA/nccl.
_NVLINK_S, _PCIE_S, _NETWORK_S, _START_S = 3.4e-6, 5.7e-6, 14e-6, 8.4e-6
_LL, _LL128 = (0.19, 0.5), (0.56, 0.92)
# Round trips through the kernel's TCP take tens of microseconds; an estimate.
_TCP_S = 30e-6

_MAKER = "NVIDIA, https://www.nvidia.com/en-us/data-center/nvlink/ (both directions: {} GB/s)"
_PCI = "PCI-SIG, PCI Express Base Specification {}, 16 lanes, after encoding"
_INFINIBAND = "InfiniBand Trade Association, roadmap, https://www.infinibandta.org: {} Gb/s"
_ETHERNET = "IEEE 802.3, {} Gb/s"


def _nvlink(gigabytes_per_s: float, achieved: float, switch_fraction: float = 0.0) -> LinkSheet:
    """An NVLink; NCCL's bandwidth of a link of that generation (src/graph/topo.h) is achieved."""
    return LinkSheet(
        gigabytes_per_s,
        achieved / gigabytes_per_s,
        _NVLINK_S,
        _MAKER.format(f"{2 * gigabytes_per_s:g}"),
        _START_S,
        (_LL, _LL128),
        switch_fraction,
    )


def _pcie(generation: str, gigabytes_per_s: float) -> LinkSheet:
    """PCIe between devices; NCCL counts on 12 GB/s of 16 lanes of generation 3."""
    source = _PCI.format(generation)
    return LinkSheet(
        gigabytes_per_s, 0.76, _PCIE_S, source, _START_S, (_LL,), channels=_PCIE_CHANNELS
    )


def _through_host(generation: str, gigabytes_per_s: float) -> LinkSheet:
    """PCIe of devices that cannot write to each other: everything passes the host's memory."""
    source = f"{_PCI.format(generation)}; halved, as messages are written and then read"
    return replace(_pcie(generation, gigabytes_per_s / 2), source=source)


def _rdma(source: str, gigabits_per_s: float) -> LinkSheet:
    """InfiniBand or RoCE; NCCL counts on 12 of 12.5 GB/s."""
    return LinkSheet(
        gigabits_per_s / 8, 0.96, _NETWORK_S, source.format(gigabits_per_s), _START_S, (_LL,)
    )


def _tcp(gigabits_per_s: float) -> LinkSheet:
    """Ethernet with TCP. One connection with frames of 1,500 bytes carries 0.94 of the rate."""
    return LinkSheet(gigabits_per_s / 8, 0.9, _TCP_S, _ETHERNET.format(gigabits_per_s), _START_S)


# The switch's factors give the bus bandwidths of all-reduces of 8 devices that NVIDIA states:
# 480 GB/s on H100 (https://github.com/NVIDIA/nccl-tests/issues/212).
_HOPPER_SWITCH = 0.83
_BLACKWELL_SWITCH = 0.74

LINKS: Mapping[str, LinkSheet] = MappingProxyType(
    {
        "nvlink-bridge-3090": replace(
            _nvlink(56.25, 48), source="NVIDIA GA102 whitepaper v2.1, page 17; not compared"
        ),
        "nvlink2": _nvlink(150, 6 * 20.0),
        "nvlink3": _nvlink(300, 12 * 20.0),
        "nvlink3-8": replace(
            _nvlink(200, 8 * 20.0), source="8 of the 12 links of NVLink 3; not compared"
        ),
        "nvlink4-8": replace(
            _nvlink(200, 8 * 20.6, _HOPPER_SWITCH),
            source="8 of the 18 links of NVLink 4; 160 GB/s: arXiv 2412.19437, section 3.2.2",
        ),
        "nvlink4": _nvlink(450, 18 * 20.6, _HOPPER_SWITCH),
        "nvlink5": _nvlink(900, 18 * 40.1, _BLACKWELL_SWITCH),
        "nvlink-c2c": LinkSheet(
            450, 0.83, _NVLINK_S, "NVIDIA GH200 data sheet: 900 GB/s both ways"
        ),
        "infinity-fabric": LinkSheet(
            448, 0.7, _NVLINK_S, "AMD Instinct MI300X data sheet: 7 links of 128 GB/s both ways; "
            "the achieved fraction is an estimate", _START_S, (_LL,),
        ),
        "pcie3": _pcie("3.0", 15.75),
        "pcie4": _pcie("4.0", 31.5),
        "pcie5": _pcie("5.0", 63.0),
        "pcie3-host": _through_host("3.0", 15.75),
        "pcie4-host": _through_host("4.0", 31.5),
        "pcie5-host": _through_host("5.0", 63.0),
        "infiniband-edr": _rdma(_INFINIBAND, 100),
        "infiniband-hdr": _rdma(_INFINIBAND, 200),
        "infiniband-ndr": _rdma(_INFINIBAND, 400),
        "infiniband-xdr": _rdma(_INFINIBAND, 800),
        "roce-100": _rdma(_ETHERNET, 100),
        "roce-200": _rdma(_ETHERNET, 200),
        "roce-400": _rdma(_ETHERNET, 400),
        "ethernet-1": _tcp(1),
        "ethernet-10": _tcp(10),
        "ethernet-25": _tcp(25),
        "ethernet-100": _tcp(100),
    }
)  # fmt: skip
"""Links by name."""

_MAMF = "products: the highest of many shapes, Machine Learning Engineering (S. Bekman), MAMF"
_DEPTH = "depth: NVIDIA A100, cuBLAS by size (figure 6 of Machine Learning Engineering's source)"
_USUAL = "the rest: estimates, until a profile of the device replaces them"
# launch_s: seconds of a step ÷ its kernels where the host is never done first, on the hosts of an
# H100 and an H200, and function: of gelu there, in docs/gpu (`make gpu`).
# Under long load the power limit lowers the clock. Ampere: derived from the training runs of arXiv
# 2205.05198, table 5 (`benchmarks/published_runs.py`); 0.93 by clocks, 1,305 MHz under HPL of 1,410
# (https://glennklockwood.com/garden/peak-FLOPS). Hopper: an H100 goes from 1,980 to 1,575 MHz
# (https://github.com/deepseek-ai/DeepGEMM/issues/120), an H200 sustains 1,500 MHz at 700 W
# (https://github.com/tile-ai/TileOPs/pull/1588). Blackwell: a B200 loses 15 % of its rate within
# 80 kernels (https://github.com/flashinfer-ai/flashinfer/pull/2899). Others: as Ampere.
_SUSTAINED_AMPERE, _SUSTAINED_HOPPER, _SUSTAINED_BLACKWELL = 0.9, 0.8, 0.85
_AMPERE = Efficiency(
    product=0.87, sustained=_SUSTAINED_AMPERE, product_depth=128, tile=128,
    attention_forward=0.73, attention_backward=0.63,
    attention_small_head=0.86, attention_small_head_backward=0.88,
    attention_length=110, copy=0.85, function=0.7, host=0.7, kernel_s=2e-6, launch_s=35e-6,
    source=f"attention: FlashAttention-2, arXiv 2307.08691, section 4.1; {_MAMF}; {_DEPTH}; "
    + _USUAL,
)  # fmt: skip
_HOPPER = replace(
    _AMPERE, product=0.80, sustained=_SUSTAINED_HOPPER, product_depth=192, function=0.163,
    attention_forward=0.617, attention_backward=0.535,
    attention_small_head=0.68, attention_small_head_backward=0.84,
    source="attention: cuDNN, which torch takes from 2.11 on (sdp_utils.cpp), on an H100, arXiv "
    f"2407.08608, figures 5 and 6; {_MAMF}; {_USUAL}",
)  # fmt: skip
# GeForce cards run above the clocks of their data sheets: 42 of 40 TFLOP/s (TF32) and 81 of 80
# (float16) on an RTX 3090 Ti, 86 of 82.6 and 172 of 165.2 on an RTX 4090, products of 8,192 rows
# whose depth and tiles cost 4 %.
_GEFORCE_PRODUCT = 1.05
_GEFORCE = "products: https://github.com/mli/transformers-benchmarks, micro_bench.ipynb"
GENERATIONS: Mapping[str, Efficiency] = MappingProxyType(
    {
        "older": replace(
            _AMPERE, product=0.75, attention_forward=0.4, attention_backward=0.35,
            source=f"memory-efficient attention instead of FlashAttention-2; {_USUAL}",
        ),
        "pascal": replace(
            _AMPERE, product=0.98, attention_forward=0.3, attention_backward=0.25,
            source="products: a block of BERT-large in float32 on a P100, "
            "https://github.com/Shigangli/Chimera, prof/bert-large_time_memory_p100.csv, 64 "
            f"samples; memory-efficient attention, an estimate; {_USUAL}",
        ),
        "ampere": _AMPERE,
        "ampere-geforce": replace(
            _AMPERE, product=_GEFORCE_PRODUCT, source=f"as Ampere; {_GEFORCE}; {_USUAL}"
        ),
        "ada": replace(
            _AMPERE, product=0.85, attention_forward=0.62, attention_backward=0.55,
            source=f"as Ampere, whose instructions for products it has; {_USUAL}",
        ),
        "ada-geforce": replace(
            _AMPERE, product=_GEFORCE_PRODUCT, attention_forward=0.62, attention_backward=0.55,
            source=f"as Ada; {_GEFORCE}; {_USUAL}",
        ),
        "hopper": _HOPPER,
        "blackwell": replace(
            _HOPPER, product=0.775, sustained=_SUSTAINED_BLACKWELL,
            attention_forward=0.68, attention_backward=0.5, attention_length=200,
            source="attention forward: cuDNN, which torch takes, "
            "https://github.com/Dao-AILab/flash-attention/pull/2605, backward an estimate; "
            f"{_MAMF}; {_USUAL}",
        ),
        "cdna3": replace(
            _AMPERE, product=0.51, product_depth=192,
            attention_forward=0.3, attention_backward=0.22,
            source=f"{_MAMF}; {_USUAL}, attention too",
        ),
    }
)  # fmt: skip
"""Efficiency of operators by generation."""


def _rates(
    single: float, half: float, *, tf32: float = 0.0, fp8: float = 0.0, bf16: bool = True
) -> Mapping[str, float]:
    rates = {"float32": single, "float16": half, "bfloat16": half if bf16 else 0.0}
    rates |= {"tfloat32": tf32, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return MappingProxyType({name: rate for name, rate in rates.items() if rate})


_SITE = "https://www.nvidia.com/en-us/data-center"
_A100 = DataSheet(
    _rates(19.5, 312, tf32=156), 79.15, 2039, 108, "nvlink3", "pcie4", "infiniband-hdr", 1,
    "ampere",
    f"NVIDIA A100 data sheet, {_SITE}/a100/",
)  # fmt: skip
_H100 = DataSheet(
    _rates(67, 989, tf32=494.5, fp8=1979), 79.1, 3350, 132, "nvlink4", "pcie5", "infiniband-ndr", 1,
    "hopper", f"NVIDIA H100 data sheet, {_SITE}/h100/",
)  # fmt: skip
_GH200 = replace(
    _H100, memory_gibibytes=94.5, memory_gigabytes_per_s=4000, host_link="nvlink-c2c",
    source=f"NVIDIA GH200 data sheet, {_SITE}/grace-hopper-superchip/",
)  # fmt: skip
_V100 = DataSheet(
    _rates(15.7, 125, bf16=False), 15.77, 900, 80, "nvlink2", "pcie3", "infiniband-edr", 2, "older",
    f"NVIDIA V100 data sheet, {_SITE}/v100/ (SXM2)",
)  # fmt: skip

_MI300X = DataSheet(
    _rates(163.4, 1307, tf32=653.7, fp8=2614.9), 191.98, 5300, 304, "infinity-fabric", "pcie5",
    "roce-400", 1, "cdna3", "AMD Instinct MI300X data sheet, "
    "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
)  # fmt: skip

SHEETS: Mapping[str, DataSheet] = MappingProxyType(
    {
        "a10": DataSheet(
            _rates(31.2, 125, tf32=62.5), 22.0, 600, 72, "pcie4", "pcie4", "ethernet-25", 8,
            "ampere",
            f"NVIDIA A10 data sheet, {_SITE}/products/a10-gpu/",
        ),
        "a100-40gb": replace(_A100, memory_gibibytes=39.4, memory_gigabytes_per_s=1555),
        "a100-40gb-pcie": replace(
            _A100, memory_gibibytes=39.4, memory_gigabytes_per_s=1555, link="pcie4",
            devices_per_adapter=4,
        ),
        "a100-80gb": _A100,
        "a100-80gb-pcie": replace(
            _A100, memory_gigabytes_per_s=1935, link="pcie4", devices_per_adapter=4
        ),
        "a800-80gb": replace(
            _A100, link="nvlink3-8", source=f"{_A100.source}, with fewer links; not compared"
        ),
        "b200": DataSheet(
            _rates(75, 2250, tf32=1125, fp8=4500), 178.35, 8000, 148, "nvlink5", "pcie5",
            "infiniband-ndr", 1, "blackwell",
            "NVIDIA DGX B200 data sheet, an eighth: 1,440 GB and 64 TB/s. NVIDIA's HGX page says "
            "62 TB/s; float32: 600 TFLOP/s of 8 (others print 80 each)",
        ),
        "gb200": DataSheet(
            _rates(80, 2500, tf32=1250, fp8=5000), 183.6, 8000, 148, "nvlink5", "nvlink-c2c",
            "infiniband-ndr", 1, "blackwell",
            "NVIDIA GB200 NVL72 data sheet, a 72nd: 180 PFLOP/s of bfloat16 and 5,760 TFLOP/s of "
            "float32; memory of 186 GB, not compared",
        ),
        "gh200-96gb": _GH200,
        "gh200-144gb": replace(
            _GH200, memory_gibibytes=139.8, memory_gigabytes_per_s=4900,
            source=f"{_GH200.source}; memory not compared",
        ),
        "h100-pcie": DataSheet(
            _rates(51, 756, tf32=378, fp8=1513), 79.1, 2000, 114, "pcie5", "pcie5",
            "infiniband-ndr",
            4, "hopper", _H100.source,
        ),
        "h100-sxm": _H100,
        "h200": replace(
            _H100, memory_gibibytes=139.8, memory_gigabytes_per_s=4800,
            source=f"NVIDIA H200 data sheet, {_SITE}/h200/",
        ),
        "h800": replace(
            _H100, link="nvlink4-8",
            source=f"{_H100.source}, with the links of arXiv 2412.19437, section 3.2.2",
        ),
        "l4": DataSheet(
            _rates(30.3, 121, tf32=60, fp8=242), 22.0, 300, 58, "pcie4", "pcie4", "ethernet-25", 8,
            "ada", f"NVIDIA L4 data sheet, {_SITE}/l4/; not compared",
        ),
        "l40s": DataSheet(
            _rates(91.6, 362, tf32=183, fp8=733), 44.4, 864, 142, "pcie4", "pcie4", "roce-200", 4,
            "ada", f"NVIDIA L40S data sheet, {_SITE}/l40s/",
        ),
        "mi300x": _MI300X,
        "mi325x": replace(
            _MI300X, memory_gibibytes=255.98, memory_gigabytes_per_s=6000,
            source="AMD Instinct MI325X data sheet; not compared",
        ),
        "rtx-3090": DataSheet(
            _rates(35.6, 71, tf32=35.6), 23.69, 936, 82, "pcie4-host", "pcie4", "infiniband-edr", 8,
            "ampere-geforce", "NVIDIA Ampere GA102 whitepaper v2.1, appendix A",
        ),
        "rtx-4090": DataSheet(
            _rates(82.6, 165.2, tf32=82.6, fp8=330.3), 23.64, 1008, 128, "pcie4-host", "pcie4",
            "infiniband-edr", 8, "ada-geforce",
            "NVIDIA Ada GPU architecture whitepaper v2.1, appendix A",
        ),
        "t4": DataSheet(
            _rates(8.1, 65, bf16=False), 14.56, 320, 40, "pcie3", "pcie3", "ethernet-25", 8,
            "older",
            f"NVIDIA T4 data sheet, {_SITE}/tesla-t4/",
        ),
        "v100": _V100,
        "v100-32gb": replace(_V100, memory_gibibytes=31.73),
    }
)  # fmt: skip
"""Data sheets by name."""

ALIASES: Mapping[str, str] = MappingProxyType(
    {
        "a100": "a100-80gb",
        "a100-80gb-sxm": "a100-80gb",
        "a100-40gb-sxm": "a100-40gb",
        "gh200": "gh200-96gb",
        "h100": "h100-sxm",
        "3090": "rtx-3090",
        "4090": "rtx-4090",
        "rtx3090": "rtx-3090",
        "rtx4090": "rtx-4090",
        "v100-16gb": "v100",
    }
)
"""Further names of data sheets; the shortest mean the device that clusters usually have."""
