"""Checkpoint formats of learned drafters: found from the files alone, and mapped to one `HeadConfig`."""
