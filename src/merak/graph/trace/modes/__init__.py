"""Modes in which a trace runs: what torch.export alone would record wrongly, or not at all."""
