"""A test of a trainer as transformers' own are, for `transformers_tests.py` without their tree."""

import torch
from torch import nn
from transformers import Trainer, TrainingArguments


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(1))

    def forward(self, x, labels):
        return {"loss": (self.a * x - labels).square().mean()}


def test_train(tmp_path):
    rows = [{"x": torch.full((1,), i / 8), "labels": torch.full((1,), i / 4)} for i in range(8)]
    args = TrainingArguments(
        str(tmp_path),
        max_steps=4,
        learning_rate=0.1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    model = Line()
    trainer = Trainer(model, args, train_dataset=rows)
    assert trainer.train().global_step == 4
    assert model.a.item() > 0
