"""Everyday PyTorch models, as people write them: each takes its columns and gives its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from merak.check import Case
from tests.zoo.plain import batches
from tests.zoo.plain import diffusion as d
from tests.zoo.plain import forms as f
from tests.zoo.plain import habits as h
from tests.zoo.plain import images as i
from tests.zoo.plain import sequences as s
from tests.zoo.plain import states as t

Draw = Callable[[int, torch.Generator], batches.Tensors]

MODELS: Mapping[type[nn.Module], Draw] = {
    i.ResNet: batches.images,
    i.BottleneckResNet: batches.images,
    i.Convolutions: batches.masks,
    i.ConvNeXt: batches.images,
    i.UNet: batches.masks,
    i.Mixer: batches.images,
    i.VAE: batches.images_with_noise,
    d.Diffusion: batches.images,
    d.DiT: batches.noisy_classes,
    d.DenoisingUNet: batches.noisy_images,
    s.LSTM: batches.tokens,
    s.GRU: batches.tokens,
    s.BiLSTM: batches.texts,
    s.Packed: batches.unequal_tokens,
    s.Unrolled: batches.tokens,
    s.NanoGPT: batches.tokens,
    s.RotaryGPT: batches.tokens,
    s.TemporalConvs: batches.tokens,
    s.Transformer: batches.tokens_with_masks,
    s.EncoderDecoder: batches.tokens,
    s.Latents: batches.texts,
    s.Bag: batches.texts,
    f.Dataclass: batches.vectors,
    f.NamedTuples: batches.vectors,
    f.Shared: batches.vectors,
    f.Experts: batches.vectors,
    f.InPlace: batches.vectors,
    f.Frozen: batches.vectors,
    f.Spectral: batches.vectors,
    f.Contrastive: batches.two_views,
    f.Highway: batches.vectors,
    f.Checkpointed: batches.vectors,
    f.Regressor: batches.vectors,
    h.Backward: batches.vectors,
    h.Annealed: batches.vectors,
    h.Twins: batches.two_views,
    h.Supervised: batches.vectors,
    h.Discriminator: batches.two_pictures,
    h.Cached: batches.tokens,
    t.VectorQuantized: batches.pictures,
    t.ActorCritic: batches.vectors,
    t.MessagePassing: batches.graphs,
    t.Recommender: batches.clicks,
}
"""The models, and how their batches are drawn."""
LOSSES: Mapping[type[nn.Module], Callable[[Any, Any], torch.Tensor]] = {
    f.Regressor: f.focal,
    i.BottleneckResNet: i.class_loss,
    d.DiT: d.noise_loss,
    d.DenoisingUNet: d.noise_loss,
}
"""The losses of those that compute none themselves."""


def draw(model: type[nn.Module], step: int, samples: int) -> batches.Tensors:
    """The batch of a step."""
    return MODELS[model](samples, torch.Generator().manual_seed(step))


def case_of(model: type[nn.Module]) -> Case:
    """A model as a check takes it."""
    return Case(model.__name__, model, partial(draw, model), LOSSES.get(model))


BY_NAME = {model.__name__: model for model in MODELS}
"""The models by the names that the zoo's table has."""
