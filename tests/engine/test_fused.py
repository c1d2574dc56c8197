"""An engine whose target is one op: the same tokens and counts as layer by layer, with trees, pages and batches."""

import functools

import jax.numpy as jnp
import pytest
from support import engines, heads, laws, toy

from specjax.config import ConfigError, RunConfig
from specjax.drafters import learned
from specjax.sampling import SamplingParams
from specjax.targets import fused

NEW, SHORT = SamplingParams(max_tokens=24), SamplingParams(max_tokens=12)
ASKED = engines.prompt(9, 1)


def test_trees_over_a_paged_batch_give_the_tokens_of_plain_decoding():
    """An accepted path is moved in all layers of the one cache array; prompts are prefilled into the same."""
    drafter, options = engines.SETUPS["tree of 6 batch paged"]
    engine = engines.narrow(toy.engine(drafter, (), target=fused.fuse(*toy.tiny()), **options))
    prompts = [engines.prompt(length, seed) for seed, length in enumerate((5, 17, 30, 13))]
    texts = [engines.solo(prompt, NEW).token_ids for prompt in prompts]
    scripts = [engines.script(p, ids, wrong_every=i) for i, (p, ids) in enumerate(zip(prompts, texts, strict=True))]
    engine.params = {**engine.params, "drafter": engines.np.stack(scripts)}
    results = engines.decode(engine, prompts, NEW)
    assert [result.token_ids for result in results] == texts
    for result, script, prompt, ids in zip(results, scripts, prompts, texts, strict=True):
        assert result.spec == engines.expected_stats(drafter, script, prompt, ids)


@functools.cache
def rounded():
    """The tiny target with its layers in 8 bits."""
    return fused.fuse(*toy.tiny(), int8=True)


@functools.cache
def said():
    """What the rounded target says to `ASKED`."""
    return engines.narrow(toy.engine(target=rounded())).generate(ASKED, SHORT).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("family", ["eagle3", "mtp"])
def test_drafters_read_the_rounded_target(family):
    """Trap 19: on a target in 8 bits every draft is what numpy makes of *that* target's taps or hidden states, with the
    embedding and the head as they were, which nobody rounds. The target before rounding would draft something else.
    """
    config = heads.head_config(family, **({"taps": (0, 1)} if family == "eagle3" else {}))
    tensors = heads.random_tensors(config)
    drafter, params = learned.build(config, tensors, *rounded(), jnp.float32, depth=3, branching=1)
    assert params["head"]["weight"] is rounded()[1]["head"]["weight"]
    engine = engines.narrow(toy.engine(drafter, params, rounded()))
    drafts = laws.watched(engine)
    assert engine.generate(ASKED, SHORT).token_ids == said()
    right, unrounded = (heads.expected_chain(config, tensors, target, 3) for target in (rounded(), toy.tiny()))
    told = wrong = 0
    for committed, _, tokens, _ in drafts:
        want = right(committed)[: len(tokens) - 1]
        assert tokens[1 : 1 + len(want)] == want
        told += len(want)
        wrong += unrounded(committed)[: len(want)] != want
    assert told > len(drafts) and wrong


def test_modes_are_named():
    assert RunConfig().decode_step == "auto"
    with pytest.raises((ConfigError, ValueError), match="decode_step"):
        RunConfig.model_validate({"decode_step": "mega"})
    with pytest.raises((ConfigError, ValueError), match="quantization 'int8' is of the fused step"):
        RunConfig(quantization="int8")
    assert RunConfig(quantization="int8", decode_step="fused").quantization == "int8"
