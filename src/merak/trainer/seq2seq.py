"""`MerakSeq2SeqTrainer`: transformers' trainer of encoders with decoders, on a mesh of ranks."""

from __future__ import annotations

from transformers import Seq2SeqTrainer

from merak.trainer.trainer import MerakTrainer


class MerakSeq2SeqTrainer(MerakTrainer, Seq2SeqTrainer):
    """Trains as `MerakTrainer`, and evaluates as `transformers.Seq2SeqTrainer`.

    With predict_with_generate=True, every rank has a copy of the whole model while an evaluation
    lasts, and the ranks share out the batches; where a rank has no room for one, ranks of a
    pipeline generate together (`merak.callable_model`). `evaluate` and `predict` take what
    `generate` takes.

    Args:
        model: any traceable model that returns a loss and can generate.
        args: `MerakSeq2SeqArguments`, and all others as of `MerakTrainer`.

    Raises:
        MeshError: `merak.init` has not been called.
        ArgumentsError: an argument that cannot be honoured.
    """
