"""Files of weights: which tensor is in which file, and the index that says so."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from merak.core.tensor_meta import TensorMeta

INDEX = SAFE_WEIGHTS_INDEX_NAME
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of adapters, as peft names them."""

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


def is_weights(name: str) -> bool:
    """Whether a file of this name holds weights of a model.

    Args:
        name: of a file in a Hugging Face folder.
    """
    return _WEIGHTS.fullmatch(name) is not None


def split_files(
    tensors: Mapping[str, TensorMeta], max_shard_size: int | str, name: str = SAFE_WEIGHTS_NAME
) -> tuple[dict[str, tuple[str, ...]], str | None]:
    """Split tensors over files, as transformers does.

    Args:
        tensors: shape and type of each by key.
        max_shard_size: the most that one file holds, in bytes or as "5GB".
        name: of the file where there is one.

    Returns:
        Keys of each file, and the text of the index where there are several files.
    """
    split = split_torch_state_dict_into_shards(
        {k: torch.empty(m.shape, dtype=m.dtype, device="meta") for k, m in tensors.items()},
        filename_pattern=name.replace(".safetensors", "{suffix}.safetensors"),
        max_shard_size=max_shard_size,
    )
    files = {file: tuple(keys) for file, keys in split.filename_to_tensors.items()}
    if not split.is_sharded:
        return files, None
    return files, index_text(tensors, files)


def index_text(tensors: Mapping[str, TensorMeta], files: Mapping[str, Iterable[str]]) -> str:
    """Format the index of several files as transformers does.

    Args:
        tensors: shape and type of each by key.
        files: keys of each file.
    """
    metadata = {
        "total_parameters": sum(math.prod(meta.shape) for meta in tensors.values()),
        "total_size": sum(meta.num_bytes for meta in tensors.values()),
    }
    weight_map = {key: file for file, keys in files.items() for key in keys}
    index = {"metadata": metadata, "weight_map": weight_map}
    return json.dumps(index, indent=2, sort_keys=True) + "\n"
