"""A folder with a model that is made of code of its own, as people share them."""

from __future__ import annotations

import json
from pathlib import Path

REMOTE = {
    "model_type": "odd",
    "architectures": ["OddModel"],
    "auto_map": {"AutoConfig": "odd.OddConfig", "AutoModel": "odd.OddModel"},
}
CODE = """
import torch
from transformers import PreTrainedConfig, PreTrainedModel


class OddConfig(PreTrainedConfig):
    model_type = "odd"
    vocab_size: int = 50000
    hidden_size: int = 512


class OddModel(PreTrainedModel):
    config_class = OddConfig
    main_input_name = "input_ids"

    def __init__(self, config):
        super().__init__(config)
        self.embed = torch.nn.Embedding(config.vocab_size, config.hidden_size)
        self.head = torch.nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.tanh(self.embed(input_ids)))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}
"""


def write_remote_model(folder: Path) -> None:
    """Write the config and the code of a model."""
    (folder / "config.json").write_text(json.dumps(REMOTE), encoding="utf-8")
    (folder / "odd.py").write_text(CODE, encoding="utf-8")
