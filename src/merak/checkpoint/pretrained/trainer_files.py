"""Names of the files in a checkpoint of transformers' Trainer.

They are written out, since `transformers.trainer` imports datasets and pandas: seconds, and 100 MB
of every process. A test compares them with transformers' own.
"""

OPTIMIZER_NAME = "optimizer.pt"
SCALER_NAME = "scaler.pt"
SCHEDULER_NAME = "scheduler.pt"
TRAINER_STATE_NAME = "trainer_state.json"
TRAINING_ARGS_NAME = "training_args.bin"
