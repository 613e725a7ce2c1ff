"""Merak: the loop over the ranks of OPTIONS, by `merak.parallelize`."""

from job import MICROBATCHES, OPTIONS, Clock, batches, build_model, make_optimizer

import merak

mesh = merak.init(**OPTIONS["degrees"])
clock = Clock()
model = build_model()
parallel = merak.parallelize(
    model,
    {name: next(batches()).chunk(mesh.dp)[0] for name in ("input_ids", "labels")},
    optimizer=make_optimizer,
    num_microbatches=MICROBATCHES // mesh.dp,
    **OPTIONS["options"],
)
for batch in batches():
    rows = batch.chunk(mesh.dp)[mesh.dp_rank]
    loss = parallel.step({"input_ids": rows, "labels": rows})
    clock.step(loss.item())
