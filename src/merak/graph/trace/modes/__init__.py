"""Function modes and patches of a trace, for what torch.export records wrongly or not at all."""
