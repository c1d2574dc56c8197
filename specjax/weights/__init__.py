"""Checkpoints, tokenizers and where a model name is found."""
