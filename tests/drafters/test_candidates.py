"""What `bench` says of a candidate head: recall against numpy along a text of the target, for every kind of drafter."""

import jax.numpy as jnp
import numpy as np
import pytest
from support import blocks, heads, toy

from specjax.drafters import candidates, learned
from specjax.drafters.probe import read

RANK, FEW, ATOL = 4, 16, 1e-5
TEXT = np.random.default_rng(3).integers(0, toy.VOCAB, 14).tolist()


def target():
    return toy.tiny(num_layers=4, windows=(None,) * 4)


def drafter(family: str, rank: int = RANK, few: int = FEW):
    """A random drafter with a candidate head made from its own head: `(drafter, params, config, tensors)`."""
    module = blocks if family in ("dflash", "ubtree") else heads
    extra = {"mask_token_id": 5, "depths": 3} if family == "peagle" else {}
    config = module.head_config(family, own_head=True, head_rank=rank, head_candidates=few, **extra)
    tensors = module.random_tensors(config)
    for side in ("down", "up"):
        del tensors[f"candidate_head.{side}.weight"]
    made, params = learned.build(config, tensors, *target(), jnp.float32)
    return made, params, config, tensors


def test_recall_is_that_of_the_rows_that_the_head_reads():
    """At every position of the text, by a float64 head that is run from the start for each."""
    made, params, config, tensors = drafter("eagle3")
    model, weights = target()
    found = candidates.report(made, params, model, weights, [TEXT, TEXT[:5]])
    _, taps = read(model, made.taps, weights, model.init_cache(1, 256, jnp.float32), jnp.asarray(TEXT))
    reference = heads.Reference(config, tensors, weights["embedding"], tensors["lm_head.weight"])
    preview = np.asarray(params["head"]["up"], np.float64) @ np.asarray(params["head"]["down"], np.float64)
    hits = {1: [], 4: [], 16: []}
    for root in range(1, len(TEXT)):
        newest = heads.committed_rows(reference.copy(), TEXT[: root + 1], np.asarray(taps))
        best = np.argsort(-reference.logits(newest))
        few = np.argsort(-(preview @ reference.normed(newest)))[:FEW]
        for k, shares in hits.items():
            shares.append(np.isin(best[:k], few).mean())
    assert found.positions == len(TEXT) - 1  # the shorter text is left out
    assert found.recall == pytest.approx({k: np.mean(shares) for k, shares in hits.items()}, abs=ATOL)
    assert 0 < found.recall[16] < 1
    assert (found.rank, found.candidates, found.columns, found.rows) == (RANK, FEW, toy.VOCAB, 4)
    assert min(found.candidate_ms, found.full_ms) > 0


@pytest.mark.parametrize(("family", "rows", "each"), [("mtp", 1, 1), ("peagle", 3, 3), ("dflash", 4, 4)])
def test_every_kind_of_drafter(family, rows, each):
    """`rows` are read at once, `each` from every position; a head of full rank finds everything."""
    made, params, *_ = drafter(family, rank=32)
    found = candidates.report(made, params, *target(), [TEXT], batch=2)
    assert (found.rows, found.positions) == (2 * rows, each * (len(TEXT) - 1))
    assert found.recall == {1: 1.0, 4: 1.0, 16: 1.0}


def test_nothing_to_report():
    assert candidates.report(None, (), *target(), [TEXT]) is None
    config = heads.head_config("eagle3")
    made, params = learned.build(config, heads.random_tensors(config), *target(), jnp.float32)
    assert candidates.report(made, params, *target(), [TEXT]) is None
    made, params, *_ = drafter("eagle3")
    with pytest.raises(ValueError, match="of two tokens at least"):
        candidates.report(made, params, *target(), [[1]])
