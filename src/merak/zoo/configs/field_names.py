"""Names of fields of transformers configs, by meaning, and the sizes of small versions."""

from __future__ import annotations

import re

NUM_HEADS = 4
HEAD_SIZE = 8
"""Heads, and numbers per head, of a small version, where its relations allow."""

STAGE_DEPTH = 2
"""Layers of each stage of a hierarchical model: every second one may be of another kind."""

SMALLEST_WIDTH = 32
NARROWEST_STAGE = 8
"""Of the first stage of a model whose widths grow from stage to stage, where 32 is too much."""

VOCABULARY = 128
POSITIONS = 128
IMAGE = 64
EXPERTS = 4
CHOSEN_EXPERTS = 2
AXIAL = [4, 8]
WINDOW = 16
CONTEXT = 1024
"""Moments of a series, for models that take many in one patch."""

STATE = 16
NUM_FILTERS = 8
"""Channels of a first convolution, which every later one doubles."""

LAYERS = re.compile(
    r"^(num_hidden_layers|n_layers?|num_layers|\w*encoder_layers|\w*decoder_layers|num_blocks"
    r"|num_(encoder|decoder)_layers|\w*_num_hidden_layers|num_self_attends_per_block"
    r"|num_layers_per_stack|num_(spatial|temporal|auxiliary)_layers)$"
)
MAIN_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "attention_heads", "num_self_attention_heads", "mamba_n_heads",
)  # fmt: skip
HEADS = re.compile(r"(heads?$|n_heads|num_attention_heads)")
KV_HEADS = re.compile(r"(key_value_heads|kv_heads|kv_n_heads|query_groups)$")
HEADS_BY_LAYER = re.compile(r"heads_per_layer$")
HEAD_SIZES = re.compile(
    r"(head_dim$|^rotary_dim$|d_head$|headdim$|^d_kv$|^kv_channels$|^dim_head$|head_size$)"
)
ROTARY_SECTIONS = "mrope_section"
ROTARY_FACTORS = ("short_factor", "long_factor")
WIDTH = re.compile(
    r"(hidden_size|hidden_dim|intermediate_size|^d_model$|^n_embd$|^n_inner$|^dim$|ffn_dim|^dim_ff$"
    r"|^d_ff$|^dff$|^d_inner$|embed_dim$|embedding_size$|embedding_dim$|word_embed_proj_dim"
    r"|lora_rank$|lru_width|ffn_hidden_size|feed_forward_size|^emb_dim$|emb_size$|projection_dim"
    r"|projection_size|classifier_proj_size|d_latents|_ssm$|^mlp_dim$|bottleneck_(size|features)"
    r"|^number_output_channels$|dt_rank$|^time_step_rank$)"
)
VOCABULARIES = re.compile(r"(vocab_size(_per_layer_input)?|group_vocab)$")
TOKEN = re.compile(r"(_token_id|_token_index|^mask_index|^unk_index|^pad_index|^eod_token_id)$")
POSITION_COUNTS = re.compile(
    r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_(source|target)_positions)$"
)
EXPERT_COUNTS = re.compile(r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$")
CHOSEN = re.compile(r"(experts_per_tok(en)?|^moe_top_?k|^moe_k|^top_k_experts)$")
EXPERT_GROUPS = {"n_group": 2, "num_expert_group": 2, "topk_group": 1}
MAIN_WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim")
OTHERS_WIDTH = re.compile(r"(?<!ffn_)(hidden_size|d_model|embed_dim|hidden_dim)")
"""Widths that may be those of another config, where they are not their own config's main one."""

NECKS = ("neck_hidden_sizes", "post_process_channels")
WIDTH_LISTS = ("axial_pos_embds_dim", "conv_dim", "tdnn_dim", *NECKS)
MAIN_STAGE_WIDTHS = ("hidden_sizes", "embed_dim", *NECKS)
"""Widths of the stages of a hierarchical model, the first of which says how much they shrink."""

STAGE_WIDTHS = (
    *MAIN_STAGE_WIDTHS, "stem_channels", "stem_out_channels", "stage_in_channels",
    "stage_mid_channels", "stage_out_channels",
)  # fmt: skip

WIDTH_FACTORS = ("depth_multiplier", "width_multiplier", "width_coefficient")
WIDTH_FACTOR = 0.25
DEPTH_FACTORS = ("depth_coefficient",)
"""What all widths, and all depths, of some convolutional models are multiplied by."""

DEPTHS = ("depths", "depth", "block_sizes", "num_block_repeats")
LAYER_NUMBERS = re.compile(r"(idxs|layer_ids|cross_attention_layers|moe_layers|mlp_only_layers)$")
STAGES = re.compile(r"out_indices$")
"""Numbers of layers whose outputs are taken one by one, so that there are as many as before."""

DENSE_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
"""Numbers of layers without experts, in front of those with."""

PART_OF_LAYERS = ("num_kv_shared_layers",)
FILTERS = ("num_filters",)
STATES = ("mamba_d_state", "state_size", "ssm_state_size", "mamba_chunk_size")
GROUPS = re.compile(r"_groups$")
"""Groups of channels; those of a convolution may be as many as its model is wide."""

STATE_GROUPS = ("n_groups", "mamba_n_groups", "mamba_ngroups")
KINDS = re.compile(r"(layer_types|block_types|layers_block_type|attn_layers|attention_layers)$")
IMAGES = ("image_size", "crop_size")
IMAGE_TOKENS = re.compile(r"tokens_per_image$")
NUM_IMAGE_TOKENS = 4
"""Tokens that an image is pooled to: no more than a small one has patches."""

IMAGE_CHANNELS = ("num_channels", "in_chans")
"""What configs call the sides and the channels of their images, the most usual name first."""

CONTEXTS = ("context_length",)
WINDOWS = re.compile(r"^(sliding_window|attention_window(_size)?|local_attention)$")
