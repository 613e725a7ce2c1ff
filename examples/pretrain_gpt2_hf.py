"""Pretrain a small GPT-2 on the source files of Python's own standard library.

python examples/pretrain_gpt2_hf.py --output-dir runs/one-device
"""

import argparse

import torch
import transformers

import demo

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--output-dir", default="runs/pretrain_gpt2", help="where the model goes")
parser.add_argument("--data-dir", default="runs/data", help="where the tokenized text is kept")
parser.add_argument("--max-steps", type=int, default=240, help="optimizer steps")
parser.add_argument("--max-eval-blocks", type=int, help="evaluate on no more than these")
options = parser.parse_args()

corpus = demo.build_corpus(options.data_dir, vocab_size=2048, block_size=128)
held_out = corpus.held_out.take(options.max_eval_blocks or len(corpus.held_out))

transformers.set_seed(1)
config = transformers.GPT2Config(
    vocab_size=len(corpus.tokenizer),
    n_positions=128,
    n_embd=128,
    n_layer=4,
    n_head=4,
    initializer_range=0.06,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
    resid_pdrop=0.0,
    bos_token_id=corpus.tokenizer.eos_token_id,
    eos_token_id=corpus.tokenizer.eos_token_id,
)
model = transformers.GPT2LMHeadModel(config)

args = transformers.TrainingArguments(
    output_dir=options.output_dir,
    max_steps=options.max_steps,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=4,
    per_device_eval_batch_size=16,
    learning_rate=5e-3,
    lr_scheduler_type="cosine",
    warmup_steps=0.05,
    weight_decay=0.1,
    adam_beta2=0.99,
    dataloader_pin_memory=torch.cuda.is_available(),
    include_num_input_tokens_seen="all",
    logging_steps=10,
    save_strategy="no",
    report_to="none",
    log_level_replica="error",
)
trainer = transformers.Trainer(
    model=model,
    args=args,
    train_dataset=corpus.train,
    eval_dataset=held_out,
    processing_class=corpus.tokenizer,
    data_collator=transformers.default_data_collator,  # blocks are packed: nothing to pad
)
demo.show_progress(trainer)
trainer.train()
held_out_loss = trainer.evaluate()["eval_loss"]
trainer.save_model()
demo.report(trainer, corpus, held_out_loss)
