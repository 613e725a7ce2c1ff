"""Configs of architectures made small, so that a check takes seconds."""
