"""Attention of draft rows over the committed cache and their own ancestors."""
