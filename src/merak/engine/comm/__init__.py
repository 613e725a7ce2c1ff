"""Communication between ranks: activations, gradients, tied parameters, norms, buffers."""
