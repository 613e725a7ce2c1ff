"""One device: a loop of PyTorch."""

import torch
from job import MICROBATCHES, Clock, batches, build_model, make_optimizer

clock = Clock()
model = build_model()
optimizer = make_optimizer(model.parameters())
for batch in batches():
    loss = torch.zeros(())
    for rows in batch.chunk(MICROBATCHES):
        part = model(input_ids=rows, labels=rows).loss / MICROBATCHES
        part.backward()
        loss += part.detach()
    optimizer.step()
    optimizer.zero_grad()
    clock.step(loss.item())
