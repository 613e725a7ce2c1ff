"""Extensions by a script: subclasses of `MerakTrainer`, optimizers and callbacks."""
