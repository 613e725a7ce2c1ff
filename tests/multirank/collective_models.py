"""Models and losses that gather and reduce over ranks, written as the projects write them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn
from torch import nn
from torch.distributed import _functional_collectives as functional
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


class ClipOfReplicas(nn.Module):
    """The mean of replicas' losses, each with gradients of its own rows alone."""

    def __init__(self, num_replicas: int) -> None:
        super().__init__()
        self.num_replicas = num_replicas

    def forward(self, image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        def of(rows: torch.Tensor, own: int) -> torch.Tensor:
            parts = enumerate(rows.chunk(self.num_replicas))
            return torch.cat([part if i == own else part.detach() for i, part in parts])

        every = range(self.num_replicas)
        losses = [ClipLoss()(of(image, own), of(text, own), scale) for own in every]
        return torch.stack(losses).mean()


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


class SigLipLoss(nn.Module):
    """As in open_clip's `loss.py`, without exchanges between neighbours."""

    def __init__(self, rank: int = 0, world_size: int = 1, dist_impl: str = "gather") -> None:
        super().__init__()
        self.rank, self.world_size, self.dist_impl = rank, world_size, dist_impl

    def _loss(
        self, image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor, negative: bool = False
    ) -> torch.Tensor:
        logits = scale * image @ text.T - 1.0
        labels = -torch.ones_like(logits)
        if not negative:
            labels = 2 * torch.eye(len(image), device=image.device, dtype=image.dtype) + labels
        return -F.logsigmoid(labels * logits).sum() / image.shape[0]

    def forward(self, image: torch.Tensor, text: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        loss = self._loss(image, text, scale)
        if self.world_size > 1 and self.dist_impl == "reduce":
            for i in range(self.world_size):
                other = torch.distributed.nn.all_reduce(
                    text * (self.rank == i), torch.distributed.ReduceOp.SUM
                )
                loss = loss + float(i != self.rank) * self._loss(image, other, scale, negative=True)
        elif self.world_size > 1:
            texts = torch.distributed.nn.all_gather(text)
            for i in range(self.world_size):
                loss = loss + float(i != self.rank) * self._loss(
                    image, texts[i], scale, negative=True
                )
        return loss


def is_dist_avail_and_initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def get_world_size() -> int:
    return dist.get_world_size() if is_dist_avail_and_initialized() else 1


class Detector(nn.Module):
    """A loss that is divided by the number of boxes, as in DETR's `SetCriterion`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body, self.head = tower(16), nn.Linear(EMBEDDED, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        is_box = y > 0.2
        num_boxes = is_box.sum().float()
        if is_dist_avail_and_initialized():
            torch.distributed.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / get_world_size(), min=1)
        errors = F.l1_loss(self.head(self.body(x)), y, reduction="none")
        return {"loss": (errors * is_box).sum() / num_boxes}


class Dino(nn.Module):
    """A student and a teacher's centre, as in DINO's `DINOLoss`, whose teacher is frozen."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.student, self.teacher = tower(16), tower(12)
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, EMBEDDED))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        teacher_output = self.teacher(y)
        teacher = F.softmax((teacher_output - self.center) / 0.4, dim=-1).detach()
        student = F.log_softmax(self.student(x) / 0.1, dim=-1)
        loss = torch.sum(-teacher * student, dim=-1).mean()
        if self.training:
            self.update_center(teacher_output)
        return {"loss": loss}

    @torch.no_grad()
    def update_center(self, teacher_output: torch.Tensor) -> None:
        batch_center = torch.sum(teacher_output, dim=0, keepdim=True)
        if is_dist_avail_and_initialized():
            dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * get_world_size())
        self.center = self.center * 0.5 + batch_center * 0.5


class Quantizer(nn.Module):
    """A codebook of moving averages, as in lucidrains' `EuclideanCodebook`."""

    embed: torch.Tensor
    cluster_size: torch.Tensor
    embed_avg: torch.Tensor

    def __init__(self, num_codes: int = 5) -> None:
        super().__init__()
        embed = torch.randn(num_codes, EMBEDDED)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(num_codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distances = -torch.cdist(x.detach(), self.embed)
        ids = distances.argmax(dim=-1)
        onehot = F.one_hot(ids, len(self.embed)).type(x.dtype)
        quantize = F.embedding(ids, self.embed)
        if self.training:
            cluster_size = onehot.sum(dim=0)
            embed_sum = onehot.t() @ x.detach()
            if is_dist_avail_and_initialized():
                dist.all_reduce(cluster_size)
                work = dist.all_reduce(embed_sum.contiguous(), async_op=False)
                assert work is None
            self.cluster_size.data.lerp_(cluster_size, 0.2)
            self.embed_avg.data.lerp_(embed_sum, 0.2)
            smoothed = (self.cluster_size + 1e-5) / (self.cluster_size.sum() + 5e-5)
            smoothed = smoothed * self.cluster_size.sum()
            self.embed.data.copy_(self.embed_avg / smoothed.unsqueeze(1))
        return x + (quantize - x).detach(), F.mse_loss(quantize.detach(), x)


class QuantizedAutoencoder(nn.Module):
    """An autoencoder around a codebook."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.encoder, self.codebook = tower(16), Quantizer()
        self.decoder = nn.Sequential(nn.Linear(EMBEDDED, 12), nn.GELU(), nn.Linear(12, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        quantized, commitment = self.codebook(self.encoder(x))
        return {"loss": F.mse_loss(self.decoder(quantized), y) + 0.3 * commitment}


class EveryCall(nn.Module):
    """A loss by every other call that is followed, of its own rows among those of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = tower(16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        own, world = self.body(x), get_world_size()
        rank = dist.get_rank() if is_dist_avail_and_initialized() else 0
        whole = _gathered_functionally(own)
        labels = torch.arange(len(own)) + len(own) * rank
        loss = F.cross_entropy(own @ whole.T, labels)
        stacked, listed = own.new_zeros(world, *own.shape), [torch.zeros_like(own)] * world
        largest, first, mean = own.detach().amax(0), own.detach()[0].clone(), own.detach().mean(0)
        if is_dist_avail_and_initialized():
            dist.all_gather_into_tensor(stacked, own)
            listed = [torch.zeros_like(own) for _ in range(world)]
            dist.all_gather(listed, own)
            work = dist.all_reduce(largest, op=dist.ReduceOp.MAX, async_op=True)
            assert work is not None
            work.wait()
            dist.broadcast(first, src=0)
            mean = functional.all_reduce(own.mean(0), "avg", dist.group.WORLD)
        else:
            stacked, listed, mean = own.detach()[None], [own.detach()], own.mean(0)
        listed[rank] = own
        spread = (listed[rank] - 2 * stacked[rank] + mean - first).square().mean()
        return {"loss": loss + spread + (own / largest.abs().clamp(min=1)).square().mean()}


class Tokens(nn.Module):
    """Tokens of a number each: compared as samples, counted, and averaged in a buffer."""

    center: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.up, self.down = nn.Linear(1, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        tokens = self.embed(x.unsqueeze(-1))
        tokens = tokens + self.down(F.gelu(self.up(tokens)))
        mean, is_known = tokens.mean(1), y > 0.2
        number, total = is_known.sum().float(), tokens.detach().sum((0, 1))
        every = torch.cat(gathered(mean))
        rank = dist.get_rank() if is_dist_avail_and_initialized() else 0
        if is_dist_avail_and_initialized():
            dist.all_reduce(number)
            dist.all_reduce(total)
        labels = torch.arange(len(mean)) + len(mean) * rank
        errors = (tokens.mean(-1) - y).abs() * is_known
        loss = F.cross_entropy(3 * mean @ every.T, labels)
        loss = loss + errors.sum() / (number / get_world_size())
        loss = loss + (tokens - self.center).square().mean() / 9
        if self.training:
            self.center = self.center * 0.5 + total / (x.numel() * get_world_size()) * 0.5
        return {"loss": loss}


def _gathered_functionally(own: torch.Tensor) -> torch.Tensor:
    if not is_dist_avail_and_initialized():
        return own
    return functional.all_gather_tensor_autograd(own, 0, dist.group.WORLD)


def gathered(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows of all ranks, with gradients."""
    if not is_dist_avail_and_initialized():
        return (rows,)
    found: tuple[torch.Tensor, ...] = torch.distributed.nn.all_gather(rows)
    return found
