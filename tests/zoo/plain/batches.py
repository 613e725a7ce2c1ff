"""How the batches of plain models are drawn."""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]
CLASSES, WIDTH, LENGTH = 5, 16, 6


def images(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randn(samples, 3, 16, 16, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (samples,), generator=generator)}


def masks(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randn(samples, 3, 16, 16, generator=generator)
    return {"x": x, "y": torch.randint(2, (samples, 16, 16), generator=generator)}


def tokens(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randint(11, (samples, LENGTH), generator=generator)
    return {"x": x, "y": torch.randint(11, (samples, LENGTH), generator=generator)}


def vectors(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randn(samples, WIDTH, generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (samples,), generator=generator)}


def tokens_with_masks(samples: int, generator: torch.Generator) -> Tensors:
    lengths = torch.randint(2, LENGTH + 1, (samples, 1), generator=generator)
    keep = torch.arange(LENGTH) < lengths  # a boolean column
    weight = torch.rand(samples, generator=generator)
    return {**tokens(samples, generator), "keep": keep, "weight": weight}


def two_views(samples: int, generator: torch.Generator) -> Tensors:
    a = torch.randn(samples, WIDTH, generator=generator)
    return {"a": a, "b": torch.randn(samples, WIDTH, generator=generator)}


def noisy_images(samples: int, generator: torch.Generator) -> Tensors:
    noise = torch.randn(samples, 3, 16, 16, generator=generator)
    t = torch.randint(1000, (samples,), generator=generator)
    x = torch.randn(samples, 3, 16, 16, generator=generator) + noise
    return {"x": x, "t": t, "noise": noise}


def noisy_classes(samples: int, generator: torch.Generator) -> Tensors:
    y = torch.randint(CLASSES, (samples,), generator=generator)
    return {**noisy_images(samples, generator), "y": y}


def images_with_noise(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.rand(samples, 3, 16, 16, generator=generator)
    return {"x": x, "noise": torch.randn(samples, WIDTH, generator=generator)}


def texts(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randint(11, (samples, LENGTH), generator=generator)
    return {"x": x, "y": torch.randint(CLASSES, (samples,), generator=generator)}


def unequal_tokens(samples: int, generator: torch.Generator) -> Tensors:
    lengths = torch.randint(1, LENGTH + 1, (samples,), generator=generator)
    outside = torch.arange(LENGTH) >= lengths[:, None]
    drawn = tokens(samples, generator)
    return {name: t.masked_fill(outside, 0) for name, t in drawn.items()} | {"lengths": lengths}


def graphs(samples: int, generator: torch.Generator) -> Tensors:
    nodes = torch.randn(samples, LENGTH, WIDTH, generator=generator)
    edges = torch.randint(LENGTH, (samples, 2, 9), generator=generator)
    return {"nodes": nodes, "edges": edges, "y": torch.rand(samples, generator=generator)}


def clicks(samples: int, generator: torch.Generator) -> Tensors:
    fields = torch.randint(7, (samples, 3), generator=generator)
    counts = torch.rand(samples, 4, generator=generator)
    return {"fields": fields, "counts": counts, "y": torch.rand(samples, generator=generator)}


def pictures(samples: int, generator: torch.Generator) -> Tensors:
    return {"x": torch.randn(samples, 3, 16, 16, generator=generator)}


def two_pictures(samples: int, generator: torch.Generator) -> Tensors:
    x = torch.randn(samples, 3, 16, 16, generator=generator)
    return {"x": x, "noise": torch.randn(samples, 3, 16, 16, generator=generator)}
