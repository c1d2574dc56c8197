"""Drafters: one file each, one line in the registry."""
