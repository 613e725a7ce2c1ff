"""A job that tells at which addresses its ranks, and the process that started them, listen."""

from __future__ import annotations

import ipaddress
import os
import sys
from contextlib import suppress
from pathlib import Path

Work = tuple[list[str], list[str], list[str]]


def listening(pid: int) -> list[str]:
    """Addresses at which a process listens for connections from elsewhere."""
    own = set()
    for file in os.listdir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            own.add(os.readlink(f"/proc/{pid}/fd/{file}"))
    found = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(str(_address(fields[1].partition(":")[0])))
    return found


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An address of proc(5), whose words have the order of this machine."""
    raw = bytes.fromhex(text)
    words = [
        raw[i : i + 4][:: -1 if sys.byteorder == "little" else 1] for i in range(0, len(raw), 4)
    ]
    return ipaddress.ip_address(b"".join(words))


def exposed(addresses: list[str]) -> list[str]:
    """Those that another machine can reach."""
    found = [ipaddress.ip_address(address) for address in addresses]
    mapped = [getattr(one, "ipv4_mapped", None) or one for one in found]
    return [str(one) for one in mapped if not one.is_loopback]


def train() -> Work:
    """Train a step; what this rank listens at, what of it is exposed, and what of its parent is."""
    import torch
    from torch import nn

    import merak

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return {"loss": x.square().mean()}

    merak.init(dp=2, device="cpu")
    batch = {"x": torch.ones(2, 4)}
    parallel = merak.parallelize(
        Linear(), batch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )
    parallel.step(batch)
    own, parent = listening(os.getpid()), listening(os.getppid())
    return own, exposed(own), exposed(parent)


if __name__ == "__main__":
    own, reached, _ = train()
    line = f"LISTENS {sorted(own)} {sorted(reached)} {os.environ['GLOO_SOCKET_IFNAME']}\n"
    os.write(sys.stdout.fileno(), line.encode())  # at once: print could mix with the other rank
