"""A table of published cells, to hold the planner against others' measurements. Nothing is fitted to them.

A 27B target on four B300 (figures of UBTree, arXiv 2609.39972, its comparison of drafters): plain decoding 21,200
tokens a second at 512 requests; DSpark and DFlash 2 between 2.6 and 2.8 times plain at one request, 14,200 and 16,600
tokens a second at 512; 5.64 and 5.78 tokens a round. What is not published, the plain step at one request and the
drafts of DFlash, is the roofline's. Only these cells are known, so between 1 and 512 requests time is a straight line.
"""

from collections.abc import Mapping

import numpy as np

from specjax.costmodel import roofline
from specjax.costmodel.facts import find
from specjax.costmodel.priors import Prior
from specjax.costmodel.roofline import Setup
from specjax.costmodel.shapes import DRAFTERS, TARGETS
from specjax.costmodel.tables import Grid, Provenance, Table
from specjax.draft import DraftShape

SHAPES = (DraftShape.chain("dspark", 7), DraftShape.chain("dflash", 7))
CONTEXT = 1024
PLAIN_512 = 21200.0
TOKENS = {"dspark": 5.64, "dflash": 5.78}
RATIO_1 = {"dspark": 2.6, "dflash": 2.8}
RATE_512 = {"dspark": 14200.0, "dflash": 16600.0}


def table() -> Table:
    """The published cells as a latency table."""
    setup = Setup(find("b300"), 4, TARGETS["dense-27b"], "bfloat16")
    step = roofline.verify(setup, 1, 1, CONTEXT) + roofline.fixed(setup)
    rounds = {kind: (TOKENS[kind] * step / RATIO_1[kind], 512 * TOKENS[kind] / RATE_512[kind]) for kind in TOKENS}
    shape = SHAPES[1]
    drafted = roofline.draft(setup, DRAFTERS["dflash"], shape, 512, CONTEXT)
    # One request: eight rows take as long as one, by the bytes. At 512 the verify pass is what DFlash's round leaves.
    verify = np.array([[step, step], [512 / PLAIN_512, rounds["dflash"][1] - drafted]])
    draft = {s: np.array(rounds[s.kind]) - verify[:, 1] for s in SHAPES}
    batch, rows, context = (1, 512), (1, 8), (CONTEXT,)
    return Table(
        Provenance("b300", 4, "dense-27b", "bfloat16", made_by="published cells"),
        Grid.of((batch, rows, context), verify[..., None], "published"),
        {s: Grid.of((batch, context), seconds[:, None], "published") for s, seconds in draft.items()},
        fixed=0.0,
    )


def priors() -> Mapping[str, Prior]:
    """Chains of even acceptance that make the published tokens a round."""
    return {kind: Prior((_even(tokens - 1, 7),), 1.0, "published tokens a round") for kind, tokens in TOKENS.items()}


def _even(tokens: float, depth: int) -> float:
    """The acceptance whose powers up to `depth` sum to `tokens`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(1, depth + 1)) < tokens else (low, middle)
    return low
