"""Texts from sampled drafts follow the target exactly: every draft of every drafter, with the chance that it has.

A drafter is a step function of its uniform numbers. Bisecting them one after another, to their last bit, finds every
draft that it can make and how often it makes it, whatever `q` it returns. Each draft then goes, with that `q`, through
the shipped accept rule, itself enumerated (`support.exact`), and the texts of all drafts together must have the law of
a random target. The tests of each drafter check its arithmetic; here only what was drawn and what is reported matter.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, exact, heads, thresholds, toy

from specjax import sampling
from specjax.drafters import learned
from specjax.drafters.draft_model import DraftModel
from specjax.verify.registry import get_rule

DEPTH, TEMPERATURE, CONTEXT = 2, 0.7, [2, 1]
UNIT = 1 << 24  # uniform numbers are multiples of 1 / UNIT


# ---------------------------------------------------------------- drafters


def recurrent(family: str, vocab: int = 5, **options):
    """EAGLE-3 (with a draft vocabulary that lacks a token) or MTP."""
    few = {"taps": (0, 1), "draft_vocab_size": vocab - 1} if family == "eagle3" else {"draft_vocab_size": vocab}
    config = heads.head_config(family, vocab_size=vocab, own_head=True, **few)
    return learned.build(
        config,
        heads.random_tensors(config),
        *toy.tiny(vocab_size=vocab),
        jnp.float32,
        depth=DEPTH,
        sampled=True,
        **options,
    )


def peagle():
    config = heads.head_config(
        "peagle", taps=(0, 1), vocab_size=5, draft_vocab_size=5, own_head=True, depths=DEPTH, mask_token_id=0
    )
    return learned.build(config, heads.random_tensors(config), *toy.tiny(vocab_size=5), jnp.float32, sampled=True)


def block_drafter(family: str, threshold: float | None = None, **changes):
    few = {"selector_top_k": 4} if family == "dflash2" else {}
    config = blocks.head_config(
        family, vocab_size=5, draft_vocab_size=5, mask_token_id=4, block_size=3, **(few | changes)
    )
    options = {} if threshold is None else {"confidence_threshold": threshold, "calibration": (0.1, 1.0)}
    return blocks.build(config, target=toy.tiny(vocab_size=5), sampled=True, num_speculative_tokens=DEPTH, **options)


def draft_model():
    model, params = toy.tiny(vocab_size=5, seed=1)
    return DraftModel(model=model, num_speculative_tokens=DEPTH, sampled=True), params


# ---------------------------------------------------------------- their laws, measured


class Source:
    """A drafter at one context, as a function of the uniform numbers of its drafts.

    Args:
        drafter, params: the drafter.
        batch: drafts made at once.
        top_k: filter of the request.
    """

    def __init__(self, drafter, params, batch: int, top_k: int):
        features = np.random.default_rng(1).standard_normal((1, 2, 32 * max(1, len(drafter.taps)))).astype(np.float32)
        shape = drafter.shape
        self.batch, self.nodes = batch, shape.rows
        self.draws = shape.branching * (1 + (shape.depth - 1) * shape.branching)
        # A row's seed is its number, by which its uniform numbers are found.
        context = heads.context(
            np.tile(CONTEXT, (batch, 1)),
            [len(CONTEXT)] * batch,
            np.repeat(features, batch, axis=0),
            [1] * batch,
            hidden=drafter.wants_hidden,
            rows=1,
            temperature=TEMPERATURE,
            top_k=top_k,
        )
        state = drafter.init_state(batch, 8)

        @jax.jit
        def draft(params, u):
            def numbers(seed, position, stream, index=0):
                del position
                assert stream == sampling.DRAFT
                return u[seed[..., 1], index]

            with mock.patch.object(sampling, "uniforms", numbers):
                return drafter.draft(params, state, context, drafter.shape)[0]

        self._draft = lambda u: jax.device_get(draft(params, u))

    def __call__(self, units: np.ndarray) -> list[np.ndarray]:
        """Tokens, parents, live lengths and q of the drafts that numbers `units[rows, draws] / UNIT` make."""
        parts = []
        for start in range(0, len(units), self.batch):
            some = units[start : start + self.batch]
            padded = np.pad(some, ((0, self.batch - len(some)), (0, 0)))
            made = self._draft((padded / UNIT).astype(np.float32))
            parts.append([x[: len(some)] for x in (made.tokens, made.parents, made.lengths, made.q)])
        return [np.concatenate(x) for x in zip(*parts, strict=True)]

    def every_draft(self, numbers) -> tuple[np.ndarray, np.ndarray]:
        """Numbers that make every possible draft once, and the volumes that make it.

        `numbers[i]` is the index of the number that node `i + 1` is drawn with.
        """
        units, volume = np.zeros((1, self.draws), np.int64), np.ones(1)
        for node, number in enumerate(numbers, start=1):

            def token(at, units=units, node=node, number=number):
                changed = units.copy()
                changed[:, number] = np.minimum(at, UNIT - 1)
                return self(changed)[0][:, node]

            found, start = [], np.zeros(len(units), np.int64)
            while (start < UNIT).any():
                same, other, here = start, np.full_like(start, UNIT), token(start)
                while (other - same > 1).any():
                    middle = (same + other) // 2
                    still = token(middle) == here
                    same, other = np.where(still, middle, same), np.where(still, other, middle)
                for row in np.flatnonzero(start < UNIT):
                    inside = units[row].copy()
                    inside[number] = (start[row] + other[row]) // 2
                    found.append((inside, volume[row] * (other[row] - start[row]) / UNIT))
                start = other
            units, volume = np.stack([x for x, _ in found]), np.array([x for _, x in found])
        return units, volume


@dataclasses.dataclass
class Measured:
    """Every draft (whatever is cut off it included) with its probability and live length; q by prefix."""

    parents: list[int]
    probability: dict[tuple[int, ...], float]
    length: dict[tuple[int, ...], int]
    q: dict[tuple[int, ...], np.ndarray]


def measured(source: Source, numbers) -> Measured:
    units, volume = source.every_draft(numbers)
    tokens, parents, lengths, q = source(units)
    assert (parents == parents[0]).all()
    table: dict[tuple[int, ...], np.ndarray] = {}
    for row, drafted in enumerate(tokens.tolist()):
        for node, prefix in enumerate(exact.prefixes(parents[row], drafted)):
            # What a prefix was told is a function of the prefix.
            np.testing.assert_allclose(
                q[row, node], table.setdefault(prefix, q[row, node].astype(np.float64)), atol=1e-7
            )
    texts = [tuple(drafted[1:]) for drafted in tokens.tolist()]
    assert len(set(texts)) == len(texts)
    probability, length = (dict(zip(texts, x.tolist(), strict=True)) for x in (volume, lengths))
    return Measured(parents[0].tolist(), probability, length, table)


DRAFTERS = {
    "eagle3": (functools.partial(recurrent, "eagle3", branching=1), 0),
    "eagle3 tree": (functools.partial(recurrent, "eagle3", vocab=4, branching=2, rows=6), 0),
    "mtp": (functools.partial(recurrent, "mtp", branching=1), 3),
    "mtp tree": (functools.partial(recurrent, "mtp", vocab=4, branching=2, rows=6), 3),
    "peagle": (peagle, 0),
    "dflash": (functools.partial(block_drafter, "dflash"), 4),
    "dflash2": (functools.partial(block_drafter, "dflash2"), 3),
    "dspark": (functools.partial(block_drafter, "dspark", markov="rnn"), 0),
    "dspark cut": (functools.partial(block_drafter, "dspark", threshold=0.85), 0),
    "draft_model": (draft_model, 4),
}
# Nodes stand best first: root, its first child, that child's first, its second child, and one more of each.
NUMBERS = {"chain": (0, 1), "tree": (0, 2, 1, 3, 4)}
CASES = [
    (name, rule) for name in DRAFTERS for rule in (("recursive",) if name.endswith("tree") else ("chain", "block"))
]


@functools.cache
def drafts(name: str) -> Measured:
    build, top_k = DRAFTERS[name]
    is_tree = name.endswith("tree")
    return measured(Source(*build(), batch=36 if is_tree else 5, top_k=top_k), NUMBERS["tree" if is_tree else "chain"])


@functools.cache
def shipped(rule: str):
    accept = get_rule(rule).accept
    return jax.jit(lambda draft, *rest: accept(draft, DEPTH, *rest))


def law_error(rule: str, found: Measured, p, q) -> float:
    """How far the texts are from the law of `p` when drafts come as `found` and `q` is what the rule is told."""
    listed = {
        "chain": lambda length: thresholds.chain(p, q, DEPTH, length),
        "block": lambda length: thresholds.block(p, q, DEPTH, length),
        "recursive": lambda length: thresholds.recursive(p, q, found.parents, length),
    }[rule]
    cases = [
        dataclasses.replace(case, probability=found.probability[draft])
        for length in set(found.length.values())
        for case in listed(length)
        if found.length[draft := tuple(case.tokens[1:])] == length
    ]
    assert len(cases) == len(found.probability)
    law = exact.judge(shipped(rule), found.parents, cases, exact.sampled_variables, exact.sampled_place)
    assert law.uneven < 5e-6
    return law.error(p, DEPTH + 1)


@pytest.mark.parametrize("name", DRAFTERS)
def test_q_is_what_drafts_are_drawn_from(name):
    found = drafts(name)
    want = {tuple(tokens[1:]): part for part, tokens in exact.every_draft(found.q, found.parents)}
    assert found.probability == pytest.approx(want, abs=1e-6)
    assert len(want) > 8


@pytest.mark.parametrize("kind", ["random", "zeros"])
@pytest.mark.parametrize(("name", "rule"), CASES)
def test_texts_follow_the_target(name, rule, kind):
    found = drafts(name)
    p, _ = exact.world(kind, len(found.q[()]), DEPTH, seed=11)
    assert law_error(rule, found, p, found.q) < 1e-6


@pytest.mark.parametrize("rule", ["chain", "block"])
def test_a_cut_by_the_token_it_drops_breaks_the_law(rule):
    """The confidence cut of some drafts is lossless (above); the same cut by the draft's own token is not."""
    found = drafts("dspark cut")
    assert set(found.length.values()) == {DEPTH, DEPTH + 1}
    p, _ = exact.world("random", len(found.q[()]), DEPTH, seed=11)
    by_itself = {draft: DEPTH if draft[-1] == 0 else DEPTH + 1 for draft in found.length}
    assert law_error(rule, dataclasses.replace(found, length=by_itself), p, found.q) > 1e-4


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_a_q_of_another_temperature_breaks_the_law(name, rule):
    """Drafts drawn at 0.7 whose q is reported as at 0.9: the enumeration sees it."""
    found = drafts(name)
    p, _ = exact.world("random", len(found.q[()]), DEPTH, seed=11)
    warmer = {prefix: q ** (TEMPERATURE / 0.9) for prefix, q in found.q.items()}
    warmer = {prefix: q / max(q.sum(), 1e-30) for prefix, q in warmer.items()}
    assert law_error(rule, found, p, warmer) > 1e-4
