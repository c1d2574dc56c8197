"""Sampling: what a request may ask for, the way from logits to `p`, random numbers, draws and log-probabilities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import draft as trees
from specjax import sampling
from specjax.sampling import SamplingParams, Seen
from specjax.verify.tree import tree

choose, target_distribution, pick = map(jax.jit, (sampling.choose, sampling.target_distribution, sampling.pick))
draft_distribution = jax.jit(sampling.draft_distribution)
uniforms = jax.jit(sampling.uniforms, static_argnums=2)


def batch_of(*requests: SamplingParams, prompt_lengths=None, vocab_size: int, max_bias: int = 4):
    """The state of a batch of requests."""
    lengths = [1] * len(requests) if prompt_lengths is None else prompt_lengths
    rows = [
        sampling.row_values(params, prompt_length=length, vocab_size=vocab_size, max_bias=max_bias)
        for params, length in zip(requests, lengths, strict=True)
    ]
    return jax.tree.map(lambda *values: jnp.asarray(np.stack(values)), *rows)


def seen_of(texts, prompt_lengths, *, eos=((-1,),), slots: int = 24, **rest) -> Seen:
    """The committed texts of a batch in a token buffer whose unused part is poisoned."""
    tokens = np.full((len(texts), slots), 1, np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    eos = np.broadcast_to(np.asarray(eos, np.int32), (len(texts), np.shape(eos)[-1]))
    lengths = jnp.array([len(text) for text in texts], jnp.int32)
    return Seen(
        tokens=jnp.asarray(tokens),
        lengths=lengths,
        prompt_lengths=jnp.asarray(prompt_lengths, jnp.int32),
        eos=jnp.asarray(eos),
        **rest,
    )


class TestParams:
    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_tokens", 0),
            ("max_tokens", 2.5),
            ("temperature", -0.1),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("temperature", 1e39),
            ("top_k", -1),
            ("top_k", True),
            ("temperature", "hot"),
            ("top_p", 0.0),
            ("min_p", None),
            ("top_p", 1.01),
            ("top_p", float("nan")),
            ("min_p", -0.01),
            ("min_p", 1.5),
            ("repetition_penalty", 0.0),
            ("repetition_penalty", float("inf")),
            ("presence_penalty", float("nan")),
            ("frequency_penalty", float("-inf")),
            ("logit_bias", {3: float("inf")}),
            ("logit_bias", {"cat": 1.0}),
            ("logit_bias", dict.fromkeys(range(301), 1.0)),
            ("min_tokens", -1),
            ("min_tokens", 129),
            ("seed", -1),
            ("seed", 2**64),
            ("stop", ("a", "")),
            ("stop", ""),
            ("stop", 5),
            ("stop_token_ids", (1.5,)),
            ("stop_token_ids", 3),
            ("top_p", 1e-300),
            ("repetition_penalty", 1e-300),
            ("temperature", True),
            ("ignore_eos", "yes"),
            ("include_stop", 1),
            ("logit_bias", [3]),
            ("logprobs", -1),
            ("logprobs", 21),
        ],
    )
    def test_out_of_range(self, field, value):
        with pytest.raises(ValueError, match=field):
            SamplingParams(**{field: value})

    def test_from_json(self):
        params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], logit_bias={"7": -2.5})
        assert params.stop == ("a", "b")
        assert params.stop_token_ids == (3,)
        assert params.logit_bias == {7: -2.5}
        assert SamplingParams(stop="END").stop == ("END",)
        assert dataclasses.replace(params, temperature=0.5).stop == params.stop

    def test_limits_are_allowed(self):
        SamplingParams(max_tokens=1, min_tokens=1, top_p=1.0, min_p=1.0, seed=2**64 - 1, logprobs=20)
        SamplingParams(min_p=0.0, logprobs=0, seed=0, logit_bias=dict.fromkeys(range(300), 1.0))


class TestState:
    def test_row_values(self):
        params = SamplingParams(
            temperature=0.7, top_k=99, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
            frequency_penalty=0.4, logit_bias={5: -1.5, 2: 3.0}, min_tokens=6, seed=(7 << 32) | 9, logprobs=0,
        )  # fmt: skip
        row = sampling.row_values(params, prompt_length=10, vocab_size=50, max_bias=3)
        assert row.seed.tolist() == [7, 9]
        assert row.min_length == 16
        assert row.top_k == 50
        assert row.bias_tokens.tolist() == [5, 2, -1]
        assert row.bias_values.tolist() == [-1.5, 3.0, 0.0]
        assert bool(row.logprobs)
        found = [row.temperature, row.top_p, row.min_p, row.repetition, row.presence, row.frequency]
        np.testing.assert_allclose(found, [0.7, 0.9, 0.1, 1.2, 0.3, 0.4], rtol=1e-6)

    def test_seeds(self):
        def seed(params, given=None):
            return sampling.row_values(params, prompt_length=1, vocab_size=5, seed=given).seed.tolist()

        assert seed(SamplingParams()) != seed(SamplingParams())
        assert seed(SamplingParams(seed=3)) == [0, 3]
        assert seed(SamplingParams(seed=3), 4) == [0, 4]
        with pytest.raises(ValueError, match="seed"):
            seed(SamplingParams(), 2**64)

    def test_ids_are_checked_against_the_vocabulary(self):
        for params in (SamplingParams(logit_bias={50: 1.0}), SamplingParams(stop_token_ids=(50,))):
            with pytest.raises(ValueError, match=r"names token 50; the target's vocabulary is 0\.\.49"):
                sampling.row_values(params, prompt_length=1, vocab_size=50)
        with pytest.raises(ValueError, match="has 2 entries, this engine takes 1"):
            sampling.row_values(SamplingParams(logit_bias={1: 1, 2: 1}), prompt_length=1, vocab_size=9, max_bias=1)

    def test_set_row(self):
        state = sampling.neutral(3, 2)
        params = SamplingParams(temperature=0.25, seed=5, logit_bias={1: 2.0})
        row = sampling.row_values(params, prompt_length=4, vocab_size=9, max_bias=2)
        setter = jax.jit(sampling.set_row)
        new = setter(state, jnp.int32(1), row)
        setter(new, jnp.int32(2), row)
        assert setter._cache_size() == 1
        for name in (field.name for field in dataclasses.fields(state)):
            before, after = getattr(state, name), getattr(new, name)
            assert after.dtype == before.dtype
            np.testing.assert_array_equal(after[1], getattr(row, name))
            np.testing.assert_array_equal(after[jnp.array([0, 2])], before[jnp.array([0, 2])])

    def test_neutral_rows_leave_the_logits_alone(self):
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 11)), jnp.float32)
        seen = seen_of([[1, 2, 2], [4]], [1, 1])
        p = target_distribution(logits, jnp.arange(2), sampling.neutral(2, 3), jnp.array([3, 1]), seen)
        np.testing.assert_allclose(p, jax.nn.softmax(logits), rtol=1e-6)


def filtered(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The filters of one row by sorting, in float64. Ties go to the lower id."""
    x = logits.astype(np.float64) / temperature
    order = np.argsort(-x, kind="stable")
    keep = np.ones(len(x), bool)
    if top_k:
        keep[order[top_k:]] = False
    p = np.where(keep, np.exp(x - x.max()), 0)
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= top_p]] = False
    p = np.where(keep, p, 0)
    p = np.where(p >= min_p * p.max(), p, 0)
    return p / p.sum()


class TestFilters:
    @pytest.mark.parametrize("vocab", [3, 257, 5000])
    def test_against_sorting(self, vocab):
        rng = np.random.default_rng(vocab)
        rows = 48
        logits = (rng.normal(size=(rows, vocab)) * 3).astype(np.float32)
        asked = {
            "temperature": rng.choice([0.3, 0.7, 1.0, 2.0], rows).astype(np.float32),
            "top_k": rng.choice([0, 1, 2, 50, vocab, vocab + 7], rows).astype(np.int32),
            "top_p": rng.choice([1.0, 0.95, 0.8, 0.3, 1e-6], rows).astype(np.float32),
            "min_p": rng.choice([0.0, 0.02, 0.3, 1.0], rows).astype(np.float32),
        }
        p = np.asarray(draft_distribution(logits, *asked.values()))
        for row in range(rows):
            want = filtered(logits[row], **{name: values[row] for name, values in asked.items()})
            np.testing.assert_array_equal(p[row] > 0, want > 1e-45)
            np.testing.assert_allclose(p[row], want, rtol=2e-5, atol=1e-9)

    def test_ties_at_the_threshold_are_kept(self):
        logits = jnp.log(jnp.array([0.1, 0.3, 0.1, 0.3, 0.1, 0.1]))[None]
        one = functools.partial(draft_distribution, logits, jnp.ones(1))
        for top_k, top_p, kept in ((1, 1.0, 2), (3, 1.0, 6), (0, 0.2, 2), (0, 0.65, 6), (2, 0.2, 2)):
            p = one(jnp.array([top_k]), jnp.array([top_p]), jnp.zeros(1))
            assert int((p > 0).sum()) == kept
        zeros = jnp.array([[-0.0, 0.0, -1.0]])  # both zeros are the same logit
        p = draft_distribution(zeros, jnp.ones(1), jnp.ones(1, jnp.int32), jnp.ones(1), jnp.zeros(1))
        np.testing.assert_allclose(p, [[0.5, 0.5, 0.0]])

    def test_top_k_tells_neighbouring_floats_apart(self):
        near = np.nextafter(np.float32(-0.1), np.float32([-1, 1]))
        logits = np.array([near[0], -0.1, near[1], -5], np.float32)
        p = draft_distribution(logits[None], jnp.ones(1), jnp.full(1, 2), jnp.ones(1), jnp.zeros(1))
        assert (np.asarray(p[0]) > 0).tolist() == [False, True, True, False]

    def test_temperature_zero(self):
        """Exactly one-hot on the lowest id of the largest logits, whatever the filters."""
        logits = jnp.array([[1.0, 4.0, 4.0, -2.0], [-jnp.inf, -3.0, -3.5, -jnp.inf], [0.0, 0.0, 0.0, 0.0]])
        for top_k, top_p, min_p in ((0, 1.0, 0.0), (3, 0.5, 0.9)):
            p = draft_distribution(logits, jnp.zeros(3), jnp.full(3, top_k), jnp.full(3, top_p), jnp.full(3, min_p))
            np.testing.assert_array_equal(p, np.eye(4, dtype=np.float32)[[1, 1, 0]])

    def test_extreme_temperatures(self):
        logits = jnp.array([[0.0, 50.0, 49.9]] * 2)
        tiny = np.finfo(np.float32).tiny
        off = (jnp.zeros(2, jnp.int32), jnp.ones(2), jnp.zeros(2))
        p = draft_distribution(logits, jnp.array([tiny, 1e38]), *off)
        np.testing.assert_allclose(p, [[0, 1, 0], [1 / 3] * 3], atol=1e-6)
        row = sampling.row_values(SamplingParams(temperature=1e-42), prompt_length=1, vocab_size=3)
        assert row.temperature == 0


class TestRandomNumbers:
    def test_alone_or_in_company(self):
        seed = jnp.asarray(np.random.default_rng(0).integers(2**32, size=(7, 1, 2)), jnp.uint32)
        many = uniforms(seed, jnp.arange(5), sampling.DRAFT, jnp.arange(7)[:, None])
        for row in range(7):
            for position in range(5):
                alone = uniforms(seed[row, 0], jnp.array(position), sampling.DRAFT, jnp.array(row))
                assert alone == many[row, position]
        assert np.unique(many).size == many.size

    def test_every_argument_counts(self):
        seed = jnp.array([1, 2], jnp.uint32)
        base = uniforms(seed, 3, sampling.SAMPLE)
        others = [
            uniforms(seed[::-1], 3, sampling.SAMPLE),
            uniforms(seed, 4, sampling.SAMPLE),
            uniforms(seed, 3, sampling.ACCEPT),
            uniforms(seed, 3, sampling.DRAFT),
            uniforms(seed, 3, sampling.SAMPLE, 1),
        ]
        assert uniforms(seed, 3, sampling.SAMPLE, 0) == base
        assert np.unique([base, *others]).size == 6

    def test_it_is_threefry(self):
        key = jax.random.wrap_key_data(jnp.array([1, 2], jnp.uint32), impl="threefry2x32")
        for data in (9, sampling.ACCEPT, 4):
            key = jax.random.fold_in(key, data)
        want = (int(jax.random.key_data(key)[0]) >> 8) / 2**24
        assert float(uniforms(jnp.array([1, 2], jnp.uint32), 9, sampling.ACCEPT, 4)) == want

    def test_uniform(self):
        seed = jnp.array([4, 4], jnp.uint32)
        u = np.asarray(uniforms(seed, jnp.arange(50_000), sampling.SAMPLE))
        assert u.dtype == np.float32
        assert u.min() >= 0
        assert u.max() < 1
        counts = np.histogram(u, 20, (0, 1))[0]
        assert np.abs(counts / 2500 - 1).max() < 0.08
        assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02


class TestPick:
    @pytest.mark.parametrize("vocab", [1, 5, 128, 300, 4096])
    def test_inverse_of_the_cumulative_sum(self, vocab):
        rng = np.random.default_rng(vocab)
        p = rng.dirichlet(np.full(vocab, 0.3), size=64).astype(np.float32)
        u = rng.random(64).astype(np.float32)
        token = np.asarray(pick(p, u))
        ends = np.cumsum(p, axis=1, dtype=np.float64) / p.sum(axis=1, keepdims=True, dtype=np.float64)
        rows = np.arange(64)
        assert (ends[rows, token] > u - 1e-6).all()
        assert (np.where(token > 0, ends[rows, token - 1], 0) < u + 1e-6).all()
        np.testing.assert_array_equal(pick(p * 37, u), token)

    @pytest.mark.parametrize("vocab", [4, 130, 1000, 4096])
    def test_never_a_token_without_mass(self, vocab):
        rng = np.random.default_rng(vocab)
        edges = np.array([0.0, 2**-24, 0.5, 1 - 2**-23, 1 - 2**-24], np.float32)
        for few in (1, 2, vocab // 3):
            p = np.zeros((40, vocab), np.float32)
            for row in p:
                row[rng.permutation(vocab)[:few]] = rng.gamma(0.2, size=few).astype(np.float32) + 1e-20
            p[::2] /= p[::2].sum(axis=1, keepdims=True)
            u = np.concatenate([edges, rng.random(35).astype(np.float32)])
            token = np.asarray(pick(p, u))
            assert (p[np.arange(40), token] > 0).all()

    def test_exact_cells(self):
        p = np.tile(np.float32([0, 0.25, 0, 0.5, 0.25, 0]), (5, 1))
        assert pick(p, np.float32([0, 0.2499, 0.25, 0.7499, 0.75])).tolist() == [1, 1, 3, 3, 4]


def penalised(logits, prompt, output, repetition=1.0, presence=0.0, frequency=0.0) -> np.ndarray:
    """The three penalties, token by token."""
    out = logits.astype(np.float64).copy()
    for token in range(len(out)):
        if token in prompt or token in output:
            out[token] = out[token] / repetition if out[token] > 0 else out[token] * repetition
        out[token] -= frequency * output.count(token) + (presence if token in output else 0)
    return out


class TestAdjustments:
    PENALTIES = ({"frequency": 0.6}, {"presence": 0.8}, {"repetition": 1.4}, {"repetition": 0.7, "presence": -0.5})

    def params(self, penalty, **rest) -> SamplingParams:
        return SamplingParams(temperature=1.0, **{f"{name}_penalty": value for name, value in penalty.items()}, **rest)

    def test_penalties_of_each_node(self):
        """Prompt, output and the drafted ancestors count; siblings, padding and the root's second mention do not."""
        rng = np.random.default_rng(0)
        vocab, parents = 7, [-1, 0, 0, 1, 2, 3]
        texts = [rng.integers(vocab, size=size).tolist() for size in (3, 6, 11, 9)]
        prompts = [2, 6, 4, 1]
        tokens = rng.integers(vocab, size=(4, 6)).astype(np.int32)
        tokens[:, 0] = [text[-1] for text in texts]
        tokens[:, 3] = tokens[:, 1]
        draft = trees.tree(jnp.asarray(tokens), jnp.broadcast_to(jnp.array(parents), (4, 6)), jnp.full((4,), 6))
        state = batch_of(*(self.params(penalty) for penalty in self.PENALTIES), vocab_size=vocab)
        request, node = (jnp.asarray(x.reshape(-1)) for x in np.indices((4, 6)))
        logits = rng.normal(size=(24, vocab)).astype(np.float32) * 2
        seen = seen_of(texts, prompts, draft=draft, node=node)
        position = seen.lengths[request] + draft.depths[request, node]
        p = np.asarray(target_distribution(logits, request, state, position, seen))
        for row, (b, i) in enumerate(np.ndindex(4, 6)):
            path = []
            while i > 0:
                path.append(int(tokens[b, i]))
                i = parents[i]
            text = texts[b]
            want = penalised(logits[row], text[: prompts[b]], text[prompts[b] :] + path, **self.PENALTIES[b])
            np.testing.assert_allclose(p[row], np.exp(want) / np.exp(want).sum(), rtol=3e-6)

    def test_unused_buffer_and_unused_ids_do_nothing(self):
        logits = jnp.zeros((2, 4))
        state = batch_of(
            self.params({"frequency": 1.0, "repetition": 2.0}),
            SamplingParams(temperature=1.0, logit_bias={2: 3.0}),
            vocab_size=4,
        )
        seen = seen_of([[0, 2], [3]], [1, 1])  # the rest of the buffer says 1
        p = np.asarray(target_distribution(logits, jnp.arange(2), state, jnp.array([2, 1]), seen))
        want = np.exp([[0, 0, -1, 0], [0, 0, 3, 0]])
        np.testing.assert_allclose(p, want / want.sum(axis=1, keepdims=True), rtol=1e-6)

    def test_bias_comes_before_the_penalties(self):
        state = batch_of(self.params({"repetition": 2.0}, logit_bias={1: 6.0}), vocab_size=3)
        p = target_distribution(
            jnp.array([[0.0, -2.0, 0.0]]), jnp.array([0]), state, jnp.array([2]), seen_of([[1, 1]], [1])
        )
        want = np.exp([0, 2, 0])
        np.testing.assert_allclose(p[0], want / want.sum(), rtol=1e-6)

    def test_min_tokens_bans_every_end_token(self):
        params = SamplingParams(temperature=1.0, min_tokens=3)
        state = batch_of(params, SamplingParams(temperature=1.0), prompt_lengths=[2, 2], vocab_size=5)
        seen = seen_of([[0, 0], [0, 0]], [2, 2], eos=[[4, 1, -1]])
        for position, banned in ((2, True), (4, True), (5, False)):
            p = np.asarray(target_distribution(jnp.zeros((2, 5)), jnp.arange(2), state, jnp.full((2,), position), seen))
            np.testing.assert_allclose(p[0], np.array([1, 0, 1, 1, 0]) / 3 if banned else np.full(5, 0.2), rtol=1e-6)
            np.testing.assert_allclose(p[1], 0.2, rtol=1e-6)

    def test_one_program_serves_every_mix_and_skips_what_nobody_asks(self):
        run = jax.jit(sampling.choose)
        logits, seen = jnp.zeros((2, 6)).at[:, 3].set(1), seen_of([[3, 3], [3, 3]], [1, 1])
        for first in (
            SamplingParams(),
            SamplingParams(temperature=0.8, top_k=3, top_p=0.9),
            SamplingParams(frequency_penalty=2.0, logit_bias={1: 0.5}, min_tokens=2),
        ):
            state = batch_of(first, SamplingParams(), vocab_size=6)
            assert run(logits, jnp.arange(2), state, jnp.array([2, 2]), seen)[1] == 3
        assert run._cache_size() == 1
        jaxpr = str(jax.make_jaxpr(sampling.choose)(logits, jnp.arange(2), state, jnp.array([2, 2]), seen))
        outside = jaxpr.split("cond[")[0]
        assert "exp" not in outside
        assert "scatter" not in outside


NODES, VOCAB = 10, 50
PROMPT = (0, 3)


@jax.jit
def one_round(tokens, parents, length, logits, state, buffer, lengths, prompt_lengths, eos):
    """One verify round of one request, on a padded tree: the draft's path, and how much of it was accepted."""
    draft = trees.tree(tokens, parents, length)
    position = lengths[0] + draft.depths[0]
    seen = Seen(
        tokens=buffer, lengths=lengths, prompt_lengths=prompt_lengths, eos=eos, draft=draft, node=jnp.arange(NODES)
    )
    choice = sampling.choose(logits[position], jnp.zeros(NODES, jnp.int32), state, position, seen)
    out = tree(draft, NODES - 1, choice[None])
    return jnp.take_along_axis(tokens, out.path, axis=1)[0, 1:], out.count[0], out.token[0]


def speculate(table, params, *, drafts, rounds, prompt=PROMPT, eos=-1, parents=None):
    """Decode one request with the real functions: `table[position]` are the logits, `drafts` is what is proposed."""
    table = np.asarray(table, np.float32)
    logits = np.full((64, VOCAB), -np.inf, np.float32)
    logits[:, : table.shape[-1]] = table
    state = batch_of(params, prompt_lengths=[len(prompt)], vocab_size=VOCAB)
    live = len(drafts) + 1
    tree_parents = np.arange(-1, NODES - 1)[None]
    tree_parents[0, :live] = parents or tree_parents[0, :live]
    text = list(prompt)
    for _ in range(rounds):
        tokens, buffer = np.zeros((1, NODES), np.int32), np.full((1, 128), 1, np.int32)
        tokens[0, :live] = [text[-1], *drafts]
        buffer[0, : len(text)] = text
        sizes = (np.array([len(x)], np.int32) for x in (text, prompt))
        path, count, token = one_round(
            tokens, tree_parents, np.array([live]), logits, state, buffer, *sizes, np.array([[eos]])
        )
        text += [*path[: int(count)].tolist(), int(token)]
    return text[len(prompt) :]


class TestDecoding:
    @pytest.mark.parametrize("depth", range(7))
    def test_frequency_penalty_is_counted_token_by_token(self, depth):
        params = SamplingParams(frequency_penalty=0.6)
        text = speculate([5.0, 4.0, 0.0], params, drafts=[0] * depth, rounds=10, prompt=(2,))
        assert "".join("ABC"[token] for token in text[:10]) == "AABABABABA"

    @pytest.mark.parametrize("penalty", [{"presence_penalty": 1.5}, {"repetition_penalty": 1.3}])
    @pytest.mark.parametrize("temperature", [0.0, 0.9])
    def test_the_drafts_change_nothing(self, penalty, temperature):
        table = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32) * 2
        params = SamplingParams(temperature=temperature, seed=11, top_p=0.9, **penalty)
        plain = speculate(table, params, drafts=[], rounds=12)
        for drafts in ([1, 2, 3], plain[:3], [plain[0], 7, plain[2]]):
            assert speculate(table, params, drafts=drafts, rounds=12)[:12] == plain
        fork = [-1, 0, 0, 1, 2, 2]
        forked = speculate(table, params, drafts=[5, plain[0], 1, plain[1], 2], rounds=12, parents=fork)
        assert forked[:12] == plain
        if temperature == 0:  # and it is what the penalties ask for
            text: list[int] = []
            names = {name.removesuffix("_penalty"): value for name, value in penalty.items()}
            for position in range(2, 14):
                text.append(int(np.argmax(penalised(table[position], [0, 3], text, **names))))
            assert plain == text

    @pytest.mark.parametrize("depth", [0, 1, 4, 8])
    def test_min_tokens_counts_tokens_not_steps(self, depth):
        params = SamplingParams(min_tokens=6)
        text = speculate([1.0, 0.0, 9.0], params, drafts=[0] * depth, rounds=9, eos=2)
        assert text[:7] == [0] * 6 + [2]

    def test_each_position_has_its_own_number(self):
        params = SamplingParams(temperature=1.0, seed=5)
        text = speculate([0.0] * 50, params, drafts=[], rounds=12)
        again = speculate([0.0] * 50, params, drafts=text[:5], rounds=3)
        assert len(set(text)) > 6
        assert again == text[: len(again)]
        assert len(again) == 8  # the first round accepted all five


def test_rows_keep_to_themselves():
    """Every kind of request in one packed call equals its own call, bit for bit, padding rows or not."""
    rng = np.random.default_rng(0)
    vocab, nodes = 4096, 4
    requests = (
        SamplingParams(),
        SamplingParams(temperature=0.7, seed=1),
        SamplingParams(temperature=1.2, top_k=5, seed=2),
        SamplingParams(temperature=0.9, top_p=0.8, min_p=0.05, seed=3),
        SamplingParams(temperature=1.0, frequency_penalty=0.7, repetition_penalty=1.3, seed=4),
        SamplingParams(presence_penalty=1.0, logit_bias={7: 9.0}, min_tokens=30),
    )
    lengths = [3, 9, 1, 14, 20, 6]
    texts = [rng.integers(vocab, size=length).tolist() for length in lengths]
    prompts = [1 + length // 2 for length in lengths]
    logits = (rng.normal(size=(6, nodes, vocab)) * 4).astype(np.float32)
    tokens = rng.integers(vocab, size=(6, nodes)).astype(np.int32)
    build = jax.jit(trees.chain)

    def call(rows, padding):
        rows = list(rows)
        state = batch_of(*(requests[r] for r in rows), prompt_lengths=[prompts[r] for r in rows], vocab_size=vocab)
        count = len(rows) * nodes
        request = np.append(np.repeat(np.arange(len(rows)), nodes), np.zeros(padding, int))
        node = np.append(np.tile(np.arange(nodes), len(rows)), np.full(padding, nodes - 1))
        seen = seen_of(
            [texts[r] for r in rows],
            [prompts[r] for r in rows],
            eos=[[11, -1]],
            draft=build(tokens[rows], np.full(len(rows), nodes)),
            node=node,
            valid=np.arange(len(request)) < count,
        )
        packed = np.concatenate([logits[rows].reshape(-1, vocab), np.zeros((padding, vocab), np.float32)])
        position = np.array([lengths[r] for r in rows])[request] + node
        arguments = (packed, request, state, position, seen)
        outs = target_distribution(*arguments), choose(*arguments)
        return [np.asarray(x)[:count].reshape(len(rows), nodes, -1) for x in outs]

    p, y = call(range(6), padding=3)
    assert (p[np.arange(6)[:, None], np.arange(nodes), y[..., 0]] > 0).all()
    for row in range(6):
        alone_p, alone_y = call([row], padding=0)
        np.testing.assert_array_equal(alone_p[0], p[row])
        np.testing.assert_array_equal(alone_y[0], y[row])


@pytest.mark.parametrize("vocab", [257, 320, 1024])  # whole, and in blocks of 64 and 256
def test_argmax_is_numpys(vocab):
    """The lowest of equals; where something is NaN, the first NaN, and never an id outside the vocabulary."""
    logits = np.random.default_rng(0).integers(-3, 3, (40, vocab)).astype(np.float32)
    logits[1:4, ::50] = np.nan
    logits[4] = -np.inf
    logits[5, 200] = np.inf
    logits[6] = np.nan
    logits[7, [70, 200]] = 9  # equals in two blocks
    logits[8, -1] = 9
    got = jax.jit(sampling.argmax)(logits.reshape(8, 5, vocab))
    assert got.dtype == jnp.int32
    np.testing.assert_array_equal(got.reshape(-1), logits.argmax(axis=-1))


def test_padding_rows_do_not_switch_sampling_on():
    """Where all valid rows are greedy the argmax is taken, although a padding row samples."""
    state = batch_of(SamplingParams(), SamplingParams(temperature=1.0, seed=1), vocab_size=3)
    logits = jnp.array([[0.0, 0.0, 0.0], [0.0, 1e-6, 0.0]])
    request, position = jnp.array([0, 1]), jnp.array([5, 5])
    picked = []
    for valid in (jnp.array([True, True]), jnp.array([True, False])):
        seen = seen_of([[0], [0]], [1, 1], valid=valid)
        for offset in range(12):
            picked.append(choose(logits, request, state, position + offset, seen).tolist())
    assert all(first == 0 for first, _ in picked)
    assert len({second for _, second in picked[:12]}) == 3
    assert {second for _, second in picked[12:]} == {1}


class TestLogprobs:
    run = staticmethod(jax.jit(sampling.logprobs, static_argnums=2))

    def test_against_float64(self):
        rng = np.random.default_rng(0)
        logits = (rng.normal(size=(3, 5, 1000)) * 6).astype(np.float32)
        chosen = rng.integers(1000, size=(3, 5))
        own, rank, ids, top = map(np.asarray, self.run(logits, chosen, 4))
        x = logits.astype(np.float64)
        want = x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        np.testing.assert_allclose(own, np.take_along_axis(want, chosen[..., None], -1)[..., 0], rtol=1e-6, atol=1e-6)
        order = np.argsort(-logits, axis=-1, kind="stable")
        np.testing.assert_array_equal(ids, order[..., :4])
        np.testing.assert_allclose(top, np.take_along_axis(want, ids, -1), rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(rank, 1 + np.argmax(order == chosen[..., None], axis=-1))

    def test_ties_go_to_the_smaller_id(self):
        logits = jnp.array([2.0, 5.0, 2.0, 5.0, 2.0])
        ranks = [int(self.run(logits, jnp.array(token), 5)[1]) for token in range(5)]
        assert ranks == [3, 1, 4, 2, 5]
        assert self.run(logits, jnp.array(0), 5)[2].tolist() == [1, 3, 0, 2, 4]

    def test_near_certainty_is_not_certainty(self):
        own, rank, _, _ = self.run(jnp.array([30.0, 0.0, -jnp.inf]), jnp.array(0), 0)
        assert float(own) == pytest.approx(-np.exp(-30), rel=1e-5)
        assert rank == 1
        own, _, ids, top = self.run(jnp.array([3.0, -jnp.inf]), jnp.array(0), 1)
        assert (float(own), ids.tolist(), top.tolist()) == (0.0, [0], [0.0])

    def test_without_alternatives(self):
        own, rank, ids, top = self.run(jnp.zeros((2, 4)), jnp.array([1, 2]), 0)
        np.testing.assert_allclose(own, -np.log(4), rtol=1e-6)
        assert rank.tolist() == [2, 3]
        assert ids.shape == top.shape == (2, 0)
