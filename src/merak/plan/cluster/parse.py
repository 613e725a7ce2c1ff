"""Clusters from a short text such as "h100:8x4", or from a YAML or JSON file."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path

import torch

from merak.core.errors import MerakError, PlanError, collected, did_you_mean, raise_all
from merak.core.rank0 import warn_on_rank0
from merak.plan.cluster.cluster import Cluster, Link, Nodes
from merak.plan.cluster.fields import Field, read_fields
from merak.plan.cluster.from_profile import cluster_of
from merak.plan.cost.data_sheets import ALIASES, GENERATIONS, LINKS, SHEETS, DataSheet, LinkSheet
from merak.plan.cost.device import DeviceProfile, from_json, of_sheet, preset, sheet_name
from merak.plan.profile.profile import differences
from merak.plan.profile.profile_file import is_profile, load_profile

logger = logging.getLogger(__name__)

_SHORT = re.compile(r"(?P<device>[A-Za-z0-9_ -]+?)(?::(?P<size>\d{1,9})(?:x(?P<count>\d{1,9}))?)?")
_NEARLY = (
    re.compile(r"(?P<device>.+?) ?[x*×:@,/] ?(?P<size>\d+)(?: ?[x*×:@,/] ?(?P<count>\d+))?"),
    re.compile(r"(?:(?P<count>\d+) ?[x*×:@,/] ?)?(?P<size>\d+) ?[x*×:@,/]? ?(?P<device>\D.*)"),
)
"""Forms in which people write nodes elsewhere, such as h100x8, 8xh100 and 4x8xh100."""
_FILES = (".yaml", ".yml", ".json")


def parse_cluster(text_or_path: str, device: str | None = None) -> Cluster:
    """A cluster from "DEVICE", "DEVICE:PER_NODE", "DEVICE:PER_NODExNODES", or a file.

    Nodes of several kinds are joined by "+".

    Args:
        text_or_path: "h100" is one device, "h100:8" one node of eight, "h100:8x4" four such nodes,
            "h100:8x4+a100:8x2" two of another kind behind them; else the path of a YAML or JSON
            file, whose fields docs/devices.md lists, or of a profile.
        device: name of the devices that are here; None where those of the cluster are not. A
            profile of others is warned of.

    Raises:
        PlanError: no such device or file, or an error in the file, with its line and field.
    """
    is_file = text_or_path.endswith(_FILES) or Path(text_or_path).is_file()
    cluster = _from_file(Path(text_or_path), device) if is_file else _from_text(text_or_path)
    if cluster.num_devices > _MOST_DEVICES:
        raise PlanError(
            f"cluster={text_or_path!r} has {cluster.num_devices:,} devices; use at most "
            f"{_MOST_DEVICES:,}."
        )
    return cluster


_MOST_DEVICES = 2**20


def _from_text(text: str) -> Cluster:
    return Cluster(tuple(_nodes_of_text(own, text) for own in text.split("+")))


def _nodes_of_text(text: str, whole: str) -> Nodes:
    found = _SHORT.fullmatch(text.strip())
    meant = _meant(text.strip())
    if meant and (found is None or sheet_name(found["device"]) is None):
        raise PlanError(
            f"cluster={text!r} is not of the form DEVICE:PER_NODExNODES; did you mean {meant}?"
        )
    if found is None:
        raise PlanError(
            f"cluster={whole!r} is neither a file nor of the form DEVICE:PER_NODExNODES; "
            "write for example h100:8x4, or h100:8x4+a100:8x2 for nodes of two kinds."
        )
    size, count = int(found["size"] or 1), int(found["count"] or 1)
    if not size or not count:
        raise PlanError(f"cluster={text!r} has no devices; write for example h100:8x4.")
    name = sheet_name(found["device"])
    if name is None:
        raise PlanError(f"There is no device {found['device']!r}{_similar_device(found['device'])}")
    return _default_nodes(name, size, count)


def _meant(text: str) -> str | None:
    """The nodes that a text in another form means; None where it names no device."""
    for form in _NEARLY:
        found = form.fullmatch(text)
        if found is not None and sheet_name(found["device"]) is not None:
            count = f"x{found['count']}" if found["count"] else ""
            return f"{found['device'].strip()}:{found['size']}{count}"
    return None


def link_of(name: str) -> Link:
    """The link of a name of `LINKS`, as one device has it for itself.

    Raises:
        PlanError: no link has this name.
    """
    if name not in LINKS:
        raise PlanError(f"There is no link {name!r}{did_you_mean(name, LINKS)}")
    return _of_link_sheet(name, LINKS[name])


def _similar_device(name: str) -> str:
    similar = did_you_mean(name, [*SHEETS, *ALIASES])
    return f"; choose one of: {', '.join(SHEETS)}." if similar == "." else similar


def _of_link_sheet(name: str, sheet: LinkSheet) -> Link:
    return Link(
        name=name,
        latency_s=sheet.latency_s,
        bytes_per_s=sheet.gigabytes_per_s * 1e9 * sheet.fraction,
        protocols=sheet.protocols,
        start_s=sheet.start_s,
        switch_fraction=sheet.switch_fraction,
    )


def _shared(adapter: Link, adapters: int, devices: int) -> Link:
    """Share of a device in the adapters of its node. No device has more than one to itself."""
    return replace(adapter, bytes_per_s=adapter.bytes_per_s * min(1.0, adapters / devices))


def _default_nodes(name: str, size: int, count: int) -> Nodes:
    sheet = SHEETS[name]
    adapters = _usual_adapters(sheet, size)
    return Nodes(
        device=preset(name),
        devices_per_node=size,
        count=count,
        link=link_of(sheet.link),
        network=_shared(link_of(sheet.network), adapters, size),
        adapters=adapters,
    )


def _usual_adapters(sheet: DataSheet, size: int) -> int:
    return -(-size // sheet.devices_per_adapter)


# Files


def _from_file(path: Path, device: str | None) -> Cluster:
    if is_profile(path):
        profile = load_profile(path)
        for sentence in differences(profile, device, torch.__version__):
            warn_on_rank0(logger, "%s", sentence)
        return cluster_of(profile)
    root = read_fields(path)
    known = {"nodes"}
    fields = root.mapping(known, required=known)
    nodes, problems = list[Nodes](), list[MerakError]()
    for own in fields["nodes"].items():
        with collected(problems):
            nodes.append(_nodes(own, path.parent))
    raise_all(problems)
    return Cluster(tuple(nodes))


_OF_NODES = frozenset(
    (
        *("device", "devices_per_node", "count", "link", "network", "adapters"),
        *("dollars_per_hour", "host_memory_gigabytes"),
    )
)


def _nodes(field: Field, folder: Path) -> Nodes:
    fields = field.mapping(_OF_NODES, required={"device", "devices_per_node"})
    device, sheet = _device(fields["device"], folder)
    size = fields["devices_per_node"].count()
    adapters = _usual_adapters(sheet, size) if sheet is not None else size
    if "adapters" in fields:
        adapters = fields["adapters"].count()
    for name in ("link", "network"):
        if sheet is None and name not in fields:
            raise field.error(f"has no {name!r}, which the device's figures do not name; add it")
    link = _link(fields.get("link"), sheet.link if sheet else "")
    if link.name in LINKS and "profile" not in fields["device"].names():
        device = replace(device, communicator_bytes=LINKS[link.name].communicator_bytes)
    network = _link(fields.get("network"), sheet.network if sheet else "")
    price, memory = fields.get("dollars_per_hour"), fields.get("host_memory_gigabytes")
    return Nodes(
        device=device,
        devices_per_node=size,
        count=fields["count"].count() if "count" in fields else 1,
        link=link,
        network=_shared(network, adapters, size),
        adapters=adapters,
        dollars_per_hour=None if price is None else price.number(least=0.0),
        host_memory_bytes=None if memory is None else int(memory.number(above=0.0) * 1e9),
    )


def _link(field: Field | None, usual: str) -> Link:
    if field is None:
        return link_of(usual)
    if field.is_mapping:
        required = {"latency_s", "gigabytes_per_s"}
        fields = field.mapping({"name", *required}, required=required)
        return Link(
            name=fields["name"].text() if "name" in fields else "own",
            latency_s=fields["latency_s"].number(least=0.0),
            bytes_per_s=fields["gigabytes_per_s"].number(above=0.0) * 1e9,
        )
    name = field.text()
    if name not in LINKS:
        similar = did_you_mean(name, LINKS)
        known = f"; choose one of: {', '.join(LINKS)}." if similar == "." else similar
        raise field.error(f"is {name!r}, which is no link{known}")
    return link_of(name)


def _device(field: Field, folder: Path) -> tuple[DeviceProfile, DataSheet | None]:
    if not field.is_mapping:
        wanted = field.text()
        name = sheet_name(wanted)
        if name is None:
            raise field.error(f"is {wanted!r}, which is no device{_similar_device(wanted)}")
        return preset(name), SHEETS[name]
    if "profile" in field.names():
        return _profile(field, folder)
    fields = field.mapping(_OF_SHEET, required=_REQUIRED)
    rates = {
        name: rate.number(above=0.0) for name, rate in fields["teraflops"].mapping(None).items()
    }
    if "float32" not in rates:
        raise fields["teraflops"].error("has no 'float32'; add it")
    numbers = {name: fields[name].number(above=0.0) for name in sorted(_NUMBERS & set(fields))}
    return of_sheet(
        fields["name"].text() if "name" in fields else "own",
        rates,
        _generation(fields.get("generation")),
        memory_bytes=int(numbers["memory_gigabytes"] * 1e9),
        memory_gigabytes_per_s=numbers["memory_gigabytes_per_s"],
        host_gigabytes_per_s=numbers.get("host_gigabytes_per_s", _USUAL_HOST),
        multiprocessors=fields["multiprocessors"].count() if "multiprocessors" in fields else 0,
    ), None


_REQUIRED = frozenset(("teraflops", "memory_gigabytes", "memory_gigabytes_per_s"))
_NUMBERS = frozenset(("memory_gigabytes", "memory_gigabytes_per_s", "host_gigabytes_per_s"))
_OF_SHEET = _REQUIRED | _NUMBERS | {"name", "generation", "multiprocessors"}
_USUAL_HOST = 32.0
_USUAL_GENERATION = "ampere"


def _generation(field: Field | None) -> str:
    if field is None:
        return _USUAL_GENERATION
    name = field.text()
    if name not in GENERATIONS:
        similar = did_you_mean(name, GENERATIONS)
        known = f"; choose one of: {', '.join(GENERATIONS)}." if similar == "." else similar
        raise field.error(f"is {name!r}, which is no generation{known}")
    return name


def _profile(field: Field, folder: Path) -> tuple[DeviceProfile, DataSheet | None]:
    own = field.mapping({"profile"}, required={"profile"})["profile"]
    path = folder / own.text()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as cause:
        why = getattr(cause, "strerror", None) or "it is no text"
        raise own.error(f"is {str(path)!r}, which cannot be read ({why}); name a profile") from None
    profile = from_json(text, str(path))
    known = sheet_name(profile.name)
    return profile, SHEETS[known] if known is not None else None
