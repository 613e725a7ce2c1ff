"""What a script brings along: subclasses of `MerakTrainer`, optimizers and callbacks."""
