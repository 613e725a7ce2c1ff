"""Small versions of a transformers config, in keeping with what binds its fields together.

Fields are told apart by their names and scaled by rules that keep their relations: all sizes of a
head are divided by one number, heads by another, and every width by the product of both, so that
heads × head size stays the width and fused sizes stay sums of their parts. A model's own code has
the last word on what fits: `attempts` lists versions from the smallest to the config as it is, and
the first that trains is taken.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedConfig

Fields = dict[str, Any]

NUM_HEADS = 4
HEAD_SIZE = 8
"""Heads, and numbers per head, of a small version, where its relations allow."""

STAGE_DEPTH = 2
"""Layers of each stage of a hierarchical model: every second one may be of another kind."""

SMALLEST_WIDTH = 32
VOCABULARY = 128
POSITIONS = 128
IMAGE = 64
EXPERTS = 4
CHOSEN_EXPERTS = 2
AXIAL = [4, 8]
WINDOW = 16
STATE = 16

_LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|\w*encoder_layers|\w*decoder_layers|num_blocks"
    r"|num_(encoder|decoder)_layers|\w*_num_hidden_layers|num_self_attends_per_block"
    r"|num_layers_per_stack)$"
)
_MAIN_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "attention_heads", "num_self_attention_heads", "mamba_n_heads",
)  # fmt: skip
_HEADS = re.compile(r"(heads?$|n_heads|num_attention_heads)")
_KV_HEADS = re.compile(r"(key_value_heads|kv_heads|kv_n_heads|query_groups)$")
_HEAD_SIZE = re.compile(
    r"(head_dim$|^rotary_dim$|d_head$|headdim$|^d_kv$|^kv_channels$|^dim_head$|head_size$)"
)
_WIDTH = re.compile(
    r"(hidden_size|hidden_dim|intermediate_size|^d_model$|^n_embd$|^n_inner$|^dim$|ffn_dim|^dim_ff$"
    r"|^d_ff$|^dff$|^d_inner$|embed_dim$|embedding_size$|embedding_dim$|word_embed_proj_dim"
    r"|lora_rank$|lru_width|ffn_hidden_size|feed_forward_size|^emb_dim$|emb_size$|projection_dim"
    r"|projection_size|classifier_proj_size|d_latents|_ssm$|^mlp_dim$|bottleneck_size)"
)
_VOCABULARY = re.compile(r"vocab_size(_per_layer_input)?$")
_TOKEN = re.compile(r"(_token_id|_token_index|^mask_index|^unk_index|^pad_index|^eod_token_id)$")
_POSITIONS = re.compile(
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions)$"
)
_EXPERTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
_CHOSEN = re.compile(r"(experts_per_tok(en)?|^moe_top_?k|^moe_k|^top_k_experts)$")
_EXPERT_GROUPS = {
    "n_group": 2, "num_expert_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1,
}  # fmt: skip
_MAIN_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim")
_WIDTH_LISTS = ("axial_pos_embds_dim",)
_DEPTHS = ("depths", "block_sizes", "num_block_repeats")
_LAYER_NUMBERS = re.compile(r"(idxs|layer_ids|cross_attention_layers|moe_layers|mlp_only_layers)$")
_PART_OF_LAYERS = ("num_kv_shared_layers",)
_STATES = ("mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size")
_STATE_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
_KINDS = re.compile(r"(layer_types|block_types|layers_block_type|attn_layers|attention_layers)$")
_IMAGES = ("image_size",)
_WINDOW = re.compile(r"^(sliding_window|attention_window_size|local_attention)$")


class Group(Enum):
    """Rules that go together; a version may leave a group out."""

    LAYERS = "fewer layers"
    VOCABULARY = "a smaller vocabulary"
    LENGTHS = "shorter sequences and smaller images"
    EXPERTS = "fewer experts"
    WIDTHS = "narrower layers of fewer heads"


ALL = tuple(Group)
VERSIONS: tuple[tuple[Group, ...], ...] = (ALL, ALL[:4], ALL[:3], ALL[:2], ALL[:1], ())
"""The groups of each version, the smallest version first."""


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What the fields of one config, its nested ones aside, are scaled to.

    Args:
        groups: the rules that apply.
        layers: how many layers.
        old_layers: how many there were; 0 if the config does not say.
        heads: (new, old) number of heads.
        head_divisor: what sizes of heads are divided by.
        width_divisor: what widths are divided by.
    """

    groups: frozenset[Group]
    layers: int
    old_layers: int
    heads: tuple[int, int]
    head_divisor: int
    width_divisor: Fraction


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a small version still has to have.

    Args:
        layers: so many, if the model has them.
        heads_divisor: heads must be a multiple of this if, and only if, the model's own are.
    """

    layers: int = 2
    heads_divisor: int = 1


def attempts(
    config: PreTrainedConfig, given: Mapping[str, Any], wanted: Wanted = Wanted()
) -> Iterator[Fields]:
    """Fields to change in a config to make it small, from the smallest version to none at all.

    Args:
        config: the config as it is.
        given: fields that the user has set, which stay as they are.
        wanted: what the small versions still have to have.
    """
    seen: list[Fields] = []
    for groups in VERSIONS:
        fields = _Shrinker(given, frozenset(groups), wanted, {}).fields(config)
        if fields not in seen:
            seen.append(fields)
            yield fields


@dataclass(frozen=True, slots=True)
class _Shrinker:
    """Makes one version.

    Args:
        given: fields that stay.
        groups: the rules that apply.
        wanted: what the version still has to have.
        tokens: special tokens beyond the smaller vocabulary, and what they become; grows.
    """

    given: Mapping[str, Any]
    groups: frozenset[Group]
    wanted: Wanted
    tokens: dict[int, int]

    def fields(self, config: PreTrainedConfig) -> Fields:
        """The changes of a config and, nested, of those inside it."""
        sizes = self.sizes(config)
        changes: Fields = {}
        for name, value in vars(config).items():
            if isinstance(value, PreTrainedConfig):
                inner = self.given.get(name)
                inside = replace(self, given=inner if isinstance(inner, Mapping) else {})
                fields = inside.fields(value)
                changes[name] = {"model_type": value.model_type, **fields} if fields else {}
            elif not name.startswith("_") and name not in self.given:
                changes[name] = _small(name, self.token(name, value), sizes)
        old = vars(config)
        return {n: v for n, v in changes.items() if v != old[n] and v != {}}

    def token(self, name: str, value: Any) -> Any:
        """A special token's number within the smaller vocabulary; different ones stay different."""
        if Group.VOCABULARY not in self.groups or not _TOKEN.search(name):
            return value
        if isinstance(value, (list, tuple)):
            return [self.token(name, one) for one in value]
        if not _is_count(value) or value < VOCABULARY:
            return value
        return self.tokens.setdefault(value, VOCABULARY - 1 - len(self.tokens))

    def sizes(self, config: PreTrainedConfig) -> _Sizes:
        """What a config's own fields are scaled to."""
        numbers = {n: v for n, v in vars(config).items() if _is_count(v)}
        bound = any(rule.search(n) for n in self.given for rule in (_WIDTH, _HEADS, _HEAD_SIZE))
        # The user's widths bind all others.
        groups = self.groups - {Group.WIDTHS} if bound else self.groups
        old_layers = next((v for n, v in numbers.items() if _LAYERS.match(n)), 0)
        layers = self.layers(config, old_layers)
        old_heads = next((numbers[n] for n in _MAIN_HEADS if n in numbers), 1)
        width = next((numbers[n] for n in _MAIN_WIDTHS if n in numbers), SMALLEST_WIDTH)
        if old_heads == 1:
            divisor = Fraction(max(1, width // SMALLEST_WIDTH))
            return _Sizes(groups, layers, old_layers, (1, 1), 1, divisor)
        heads = self.heads(old_heads)
        explicit = [v for n, v in numbers.items() if _HEAD_SIZE.search(n)]
        per_head = _head_divisor(explicit or [width // old_heads])
        total = Fraction(old_heads * per_head, heads)
        return _Sizes(groups, layers, old_layers, (heads, old_heads), per_head, total)

    def layers(self, config: PreTrainedConfig, old: int) -> int:
        """How many layers: as many as the user says, or so that several kinds have a place."""
        named = [n for n in vars(config) if _LAYERS.match(n) and n in self.given]
        if named:
            return int(self.given[named[0]])
        lists = {n: v for n, v in vars(config).items() if isinstance(v, (list, tuple))}
        kinds = [len(set(map(str, v))) for v in lists.values() if len(v) == old]
        # Kinds that take turns: so many layers until each has had one.
        turns = [len(v) for n, v in lists.items() if _KINDS.search(n) and len(v) < old]
        several = 4 if max(kinds, default=1) > 1 else 2
        return min(old, max(self.wanted.layers, several, *turns))

    def heads(self, old: int) -> int:
        """How many heads."""
        divisor = self.wanted.heads_divisor
        if old % divisor:
            return next(n for n in range(min(NUM_HEADS, old), old + 1) if n % divisor)
        # Twice the degree, so that every rank may have two heads for one key-value head.
        return min(old, divisor * max(2, math.ceil(NUM_HEADS / divisor)))


def _head_divisor(sizes: Collection[int]) -> int:
    common = math.gcd(*sizes)
    return common // HEAD_SIZE if common % HEAD_SIZE == 0 and common else 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _small(name: str, value: Any, sizes: _Sizes) -> Any:
    for group, rule in _RULES.items():
        if group in sizes.groups:
            value = rule(name, value, sizes)
    return value


def _fewer_layers(name: str, value: Any, sizes: _Sizes) -> Any:
    if isinstance(value, (list, tuple)):
        if name in _DEPTHS and all(map(_is_count, value)):
            return [min(depth, STAGE_DEPTH) for depth in value]
        if _LAYER_NUMBERS.search(name) and all(map(_is_count, value)):
            # The last layer of a small version is of the rarest kind.
            return [i for i in value if i < sizes.layers] or [sizes.layers - 1][: len(value)]
        if sizes.old_layers > sizes.layers and len(value) == sizes.old_layers:
            return _one_of_each(value, sizes.layers)
        return value
    if not _is_count(value):
        return value
    if _LAYERS.match(name):
        return min(value, sizes.layers)
    return min(value, sizes.layers // 2) if name in _PART_OF_LAYERS else value


def _one_of_each(values: list[Any] | tuple[Any, ...], length: int) -> list[Any]:
    """The first values of a list by layer, but so that every kind of layer is among them."""
    first = [i for i, v in enumerate(values) if v not in values[:i]][:length]
    rest = [i for i in range(len(values)) if i not in first][: length - len(first)]
    return [values[i] for i in sorted((*first, *rest))]


def _smaller_vocabulary(name: str, value: Any, sizes: _Sizes) -> Any:
    return min(value, VOCABULARY) if _is_count(value) and _VOCABULARY.search(name) else value


def _fewer_experts(name: str, value: Any, sizes: _Sizes) -> Any:
    if not _is_count(value):
        return value
    if _EXPERTS.search(name):
        return min(value, EXPERTS)
    if _CHOSEN.search(name):
        return min(value, CHOSEN_EXPERTS)
    return min(value, _EXPERT_GROUPS.get(name, value))


def _shorter(name: str, value: Any, sizes: _Sizes) -> Any:
    if name in _IMAGES:
        if isinstance(value, (list, tuple)):
            return [min(side, IMAGE) for side in value]
        return min(value, IMAGE) if _is_count(value) else value
    if name == "axial_pos_shape":  # a grid of positions, which training fills
        return AXIAL
    if not _is_count(value) or value <= 0:
        return value
    if _POSITIONS.search(name):
        return min(value, POSITIONS)
    if _WINDOW.search(name):
        return min(value, WINDOW)
    return value


def _narrower(name: str, value: Any, sizes: _Sizes) -> Any:
    if isinstance(value, dict) and "mrope_section" in value:
        parts = [part // sizes.head_divisor for part in value["mrope_section"]]
        return {**value, "mrope_section": parts}
    if name in _WIDTH_LISTS and isinstance(value, (list, tuple)):
        return [_divided(part, sizes.width_divisor) for part in value]
    if not _is_count(value) or value <= 0:
        return value
    new, old = sizes.heads
    if _KV_HEADS.search(name):
        return new if value == old else min(value, max(1, new // 2))
    if _HEAD_SIZE.search(name):
        return value // sizes.head_divisor
    if _HEADS.search(name):
        return max(1, value * new // old)
    if _WIDTH.search(name):
        return _divided(value, sizes.width_divisor)
    if name in _STATE_GROUPS:
        return min(value, max(1, new // 2))
    return min(value, STATE) if name in _STATES else value


def _divided(width: int, divisor: Fraction) -> int:
    """A width, a multiple of 8: some kernels take no others."""
    return 8 * math.ceil(width / divisor / 8)


_RULES: Mapping[Group, Callable[[str, Any, _Sizes], Any]] = MappingProxyType(
    {
        Group.LAYERS: _fewer_layers,
        Group.VOCABULARY: _smaller_vocabulary,
        Group.LENGTHS: _shorter,
        Group.EXPERTS: _fewer_experts,
        Group.WIDTHS: _narrower,
    }
)
