"""One device: a loop of PyTorch."""

import torch
from job import MICROBATCHES, Clock, batches, build_model

clock = Clock()
model = build_model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for batch in batches():
    loss = 0.0
    for rows in batch.chunk(MICROBATCHES):
        part = model(input_ids=rows, labels=rows).loss / MICROBATCHES
        part.backward()
        loss += part.item()
    optimizer.step()
    optimizer.zero_grad()
    clock.step(loss)
