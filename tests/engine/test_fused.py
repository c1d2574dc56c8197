"""An engine whose target is one op: the same tokens and counts as layer by layer, with trees, pages and batches."""

import pytest
from support import engines, toy

from specjax.config import ConfigError, RunConfig
from specjax.sampling import SamplingParams
from specjax.targets import fused

NEW = SamplingParams(max_tokens=24)


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


def test_modes_are_named():
    assert RunConfig().decode_step == "auto"
    with pytest.raises((ConfigError, ValueError), match="decode_step"):
        RunConfig.model_validate({"decode_step": "mega"})
    with pytest.raises((ConfigError, ValueError), match="quantization 'int8' is of the fused step"):
        RunConfig(quantization="int8")
    assert RunConfig(quantization="int8", decode_step="fused").quantization == "int8"
