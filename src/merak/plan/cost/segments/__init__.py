"""Memory of one segment for one microbatch, read off its joint graph or a run by autograd."""
