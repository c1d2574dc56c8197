"""Sampling: what a request may ask for, and how logits become `p`, and `p` a token, for each node of each row.

A row never depends on its neighbours: its parameters, its counts and its random numbers are its own.
"""

from specjax.sampling.distribution import Seen, argmax, choose, draft_distribution, logprobs, target_distribution
from specjax.sampling.draws import ACCEPT, DRAFT, SAMPLE, pick, sample, uniforms
from specjax.sampling.params import MAX_BIAS, MAX_LOGPROBS, SamplingParams
from specjax.sampling.state import SamplingState, neutral, row_values, set_row

__all__ = [
    "ACCEPT",
    "DRAFT",
    "MAX_BIAS",
    "MAX_LOGPROBS",
    "SAMPLE",
    "SamplingParams",
    "SamplingState",
    "Seen",
    "argmax",
    "choose",
    "draft_distribution",
    "logprobs",
    "neutral",
    "pick",
    "row_values",
    "sample",
    "set_row",
    "target_distribution",
    "uniforms",
]
