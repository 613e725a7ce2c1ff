"""One step: its checks, the run of its schedule in training or evaluation, and the optimizer's."""
