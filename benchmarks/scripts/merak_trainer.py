"""Merak: the same trainer over the ranks of OPTIONS."""

from job import MICROBATCHES, OPTIONS, SAMPLES, STEPS, TRAINING, WARMUP, Clock, Samples, build_model

import merak

merak.init(**OPTIONS["degrees"])

clock = Clock()
trainer = merak.MerakTrainer(
    model=build_model(),
    args=merak.MerakArguments(
        output_dir="runs/side_by_side",
        max_steps=WARMUP + STEPS,
        per_device_train_batch_size=SAMPLES // MICROBATCHES,
        gradient_accumulation_steps=MICROBATCHES // OPTIONS["replicas"],
        **TRAINING,
        logging_steps=WARMUP + STEPS,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=Samples(),
    callbacks=[clock],
)
trainer.train()
