"""Models and losses that gather and reduce over ranks, written as the projects write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.nn import functional as F

WIDTH, EMBEDDED = 6, 8


def gather_features(
    image: torch.Tensor,
    text: torch.Tensor,
    local_loss: bool,
    gather_with_grad: bool,
    rank: int,
    world_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As in open_clip's `loss.py`."""
    if gather_with_grad:
        all_image = torch.cat(torch.distributed.nn.all_gather(image), dim=0)
        all_text = torch.cat(torch.distributed.nn.all_gather(text), dim=0)
        return all_image, all_text
    images = [torch.zeros_like(image) for _ in range(world_size)]
    texts = [torch.zeros_like(text) for _ in range(world_size)]
    dist.all_gather(images, image)
    dist.all_gather(texts, text)
    if not local_loss:
        images[rank] = image
        texts[rank] = text
    return torch.cat(images, dim=0), torch.cat(texts, dim=0)


class ClipLoss(nn.Module):
    """As in open_clip's `loss.py`."""

    def __init__(
        self,
        local_loss: bool = False,
        gather_with_grad: bool = False,
        cache_labels: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__()
        self.local_loss = local_loss
        self.gather_with_grad = gather_with_grad
        self.cache_labels = cache_labels
        self.rank = rank
        self.world_size = world_size
        self.prev_num_logits = 0
        self.labels: dict[torch.device, torch.Tensor] = {}

    def get_ground_truth(self, device: torch.device, num_logits: int) -> torch.Tensor:
        if self.prev_num_logits != num_logits or device not in self.labels:
            labels = torch.arange(num_logits, device=device, dtype=torch.long)
            if self.world_size > 1 and self.local_loss:
                labels = labels + num_logits * self.rank
            if self.cache_labels:
                self.labels[device] = labels
                self.prev_num_logits = num_logits
        else:
            labels = self.labels[device]
        return labels

    def forward(self, image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        if self.world_size > 1:
            all_image, all_text = gather_features(
                image, text, self.local_loss, self.gather_with_grad, self.rank, self.world_size
            )
            if self.local_loss:
                per_image = scale * image @ all_text.T
                per_text = scale * text @ all_image.T
            else:
                per_image = scale * all_image @ all_text.T
                per_text = per_image.T
        else:
            per_image = scale * image @ text.T
            per_text = scale * text @ image.T
        labels = self.get_ground_truth(image.device, per_image.shape[0])
        return (F.cross_entropy(per_image, labels) + F.cross_entropy(per_text, labels)) / 2


def tower(wide: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, wide), nn.GELU(), nn.Linear(wide, WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, EMBEDDED),
    )  # fmt: skip


class Clip(nn.Module):
    """Two towers and a temperature; returns their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.image, self.text = tower(16), tower(12)
        self.logit_scale = nn.Parameter(torch.tensor(1.2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        return {
            "image": F.normalize(self.image(x), dim=-1),
            "text": F.normalize(self.text(y), dim=-1),
            "scale": self.logit_scale.exp(),
        }
