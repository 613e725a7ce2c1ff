"""Small versions of configs of architectures, so that a check takes seconds."""
