"""A second model as drafter: what it proposes, and that its cache stays right whatever is accepted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import engines, toy

from specjax import sampling
from specjax.drafters.base import Context
from specjax.drafters.draft_model import DraftModel
from specjax.sampling import SamplingParams

K, CAPACITY, CHUNK = 4, 64, 16
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [7], [11, 12], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4, 5, 2, 3]]


@functools.cache
def drafter(sampled: bool = False) -> DraftModel:
    return DraftModel(model=toy.tiny()[0], num_speculative_tokens=K, sampled=sampled)


@functools.cache
def draft_weights():
    """Weights of the same architecture as the target's, and others."""
    return toy.tiny(seed=1)[1]


@functools.cache
def compiled(sampled: bool):
    model = drafter(sampled)
    return jax.jit(model.prefill), jax.jit(functools.partial(model.draft, shape=model.shape))


def context(texts: list[list[int]], eos: tuple[int, ...] = ()) -> Context:
    """The texts as committed tokens; rubbish lies behind them."""
    batch = len(texts)
    tokens = np.full((batch, CAPACITY), 63, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    lengths = jnp.array([len(text) for text in texts], jnp.int32)
    return Context(
        tokens=jnp.asarray(tokens),
        lengths=lengths,
        prompt_lengths=lengths,
        active=jnp.ones((batch,), bool),
        eos=jnp.asarray([[*eos, -1]] * batch, jnp.int32),
        sampling=sampling.neutral(batch),
    )


def prefilled(texts: list[list[int]], sampled: bool):
    """A state that has taken in all but the last token of each text, chunk by chunk."""
    state = drafter(sampled).init_state(len(texts), CAPACITY)
    prefill, _ = compiled(sampled)
    for row, text in enumerate(texts):
        padded = np.array([*text, *[63] * 2 * CHUNK], np.int32)
        for start in range(0, len(text) - 1, CHUNK):
            count = min(CHUNK, len(text) - 1 - start)
            tokens = padded[start : start + CHUNK + 1]
            state = prefill(draft_weights(), state, np.int32(row), tokens, np.int32(start), np.int32(count), None)
    return state


def test_shape_and_options():
    assert drafter().shape.rows == K + 1
    assert drafter().shape.kind == drafter().kind == "draft_model"
    assert hash(drafter()) == hash(DraftModel(model=toy.tiny()[0], num_speculative_tokens=K))
    with pytest.raises(ValueError, match="num_speculative_tokens must be at least 1, got 0"):
        DraftModel(model=toy.tiny()[0], num_speculative_tokens=0)


@pytest.mark.parametrize("accepted", [(0, 0, 4, 4), (1, 2, 3, 4), (4, 0, 0, 2), (4, 4, 4, 4)])
def test_the_cache_is_right_after_any_acceptance(accepted):
    """Three rounds, each keeping `accepted` drafts a row and one other token: `q` equals that of a fresh prefill."""
    texts = [list(prompt) for prompt in PROMPTS]
    state = prefilled(texts, sampled=True)
    _, draft = compiled(True)
    for turn in range(3):
        proposed, state = draft(draft_weights(), state, context(texts))
        fresh, _ = draft(draft_weights(), prefilled(texts, sampled=True), context(texts))
        assert np.array_equal(proposed.tokens, fresh.tokens)
        assert np.abs(np.asarray(proposed.q) - np.asarray(fresh.q)).max() < 1e-5
        assert np.asarray(proposed.q)[:, :K].sum(-1) == pytest.approx(1, abs=1e-5)
        for row, keep in enumerate(accepted):
            texts[row] += np.asarray(proposed.tokens)[row, 1 : 1 + keep].tolist() + [(17 * turn + row) % 63]


def test_a_draft_is_the_models_own_greedy_text():
    """Against the draft model decoding plainly, for every row of a batch."""
    plain = toy.engine(batch=2, target=(toy.tiny()[0], draft_weights()), context=CAPACITY)  # as below: compiled once
    _, draft = compiled(False)
    proposed, _ = draft(draft_weights(), prefilled(PROMPTS, sampled=False), context(PROMPTS))
    want = [plain.generate(prompt, SamplingParams(max_tokens=K)).token_ids for prompt in PROMPTS]
    assert np.asarray(proposed.tokens)[:, 1:].tolist() == want
    assert np.asarray(proposed.lengths).tolist() == [K + 1] * len(PROMPTS)
    assert proposed.q is None


def test_a_draft_is_cut_before_an_end_token():
    _, draft = compiled(False)
    tokens = np.asarray(draft(draft_weights(), prefilled(PROMPTS, sampled=False), context(PROMPTS))[0].tokens)
    for row in range(len(PROMPTS)):
        end = int(tokens[row, 3])
        proposed, _ = draft(draft_weights(), prefilled(PROMPTS, sampled=False), context(PROMPTS, eos=(end,)))
        want = [next((i for i in range(1, K + 1) if other[i] == end), K + 1) for other in tokens.tolist()]
        assert np.asarray(proposed.lengths).tolist() == want
        assert want[row] <= 3


def test_sampled_drafts_are_never_cut_and_follow_q():
    """Cutting a draft by what was drawn would bias the law; the draws are those of `q` and of the DRAFT stream."""
    _, draft = compiled(True)
    free, _ = draft(draft_weights(), prefilled(PROMPTS, sampled=True), context(PROMPTS))
    ends = tuple(int(t) for t in np.asarray(free.tokens)[:, 2])
    cut, _ = draft(draft_weights(), prefilled(PROMPTS, sampled=True), context(PROMPTS, eos=ends[:1]))
    assert np.array_equal(free.tokens, cut.tokens)
    assert np.asarray(cut.lengths).tolist() == [K + 1] * len(PROMPTS)
    root = np.array([len(text) - 1 for text in PROMPTS])
    for depth in range(K):
        u = sampling.uniforms(jnp.zeros((len(PROMPTS), 2), jnp.uint32), jnp.asarray(root), sampling.DRAFT, depth)
        assert np.array_equal(sampling.pick(free.q[:, depth], u), free.tokens[:, depth + 1])


@pytest.fixture(scope="module")
def both():
    """The tiny target alone, and with a draft model; its weights are set by the tests."""
    plain = toy.engine(batch=2, context=CAPACITY)
    return plain, engines.narrow(toy.engine(drafter(), draft_weights(), batch=2, context=CAPACITY))


def test_greedy_text_is_the_targets(both):
    """An unrelated model drafts: rows come and go, some drafts are accepted, and the text does not notice."""
    plain, drafting = both
    drafting.params = drafting.params | {"drafter": draft_weights()}
    params = [SamplingParams(max_tokens=new) for new in (24, 5, 30, 12)]
    want = plain.generate(PROMPTS, params)
    got = drafting.generate(PROMPTS, params)
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    assert sum(r.spec.accepted for r in got) < sum(r.spec.drafted for r in got)


def test_the_target_itself_drafts(both):
    """Every draft is accepted: K + 1 tokens a round, the last cut by the budget."""
    plain, drafting = both
    drafting.params = drafting.params | {"drafter": drafting.params["target"]}
    params = SamplingParams(max_tokens=34)
    want = plain.generate(PROMPTS, params)
    got = drafting.generate(PROMPTS, params)
    assert [r.token_ids for r in got] == [r.token_ids for r in want]
    for result in got:
        assert result.spec.rounds == -(-33 // (K + 1))
        assert result.spec.accepted == result.spec.drafted == 33 - result.spec.rounds


def test_end_token_in_a_draft(both):
    """The draft stops before it, the target says it, and the request ends there."""
    plain, drafting = both
    drafting.params = drafting.params | {"drafter": drafting.params["target"]}
    text = plain.generate(PROMPTS[0], SamplingParams(max_tokens=30)).token_ids
    end = next(t for i, t in enumerate(text) if i > 8 and t not in text[:i])
    params = SamplingParams(max_tokens=30, stop_token_ids=(end,))
    want, got = plain.generate(PROMPTS[0], params), drafting.generate(PROMPTS[0], params)
    assert got.token_ids == want.token_ids == text[: text.index(end) + 1]
    assert (got.finish_reason, want.finish_reason) == ("stop", "stop")
