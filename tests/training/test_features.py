import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import toy, training

from specjax.draft import chunk
from specjax.training.features import captured, fill, size, take_up
from specjax.training.packing import pack


@pytest.fixture(scope="module")
def packed():
    return pack(training.corpus(12), 2 * training.LENGTH + 2)


def test_a_packed_row_is_several_texts_apart(packed):
    target, params = toy.tiny()
    batch = packed.batch(np.arange(2))
    out = captured(target, (0, 1), params, batch)

    @jax.jit
    def alone(tokens):
        cache = target.init_cache(1, 256, jnp.float32)
        rows = chunk(tokens, jnp.int32(0), training.LENGTH)
        return target.forward(params, rows, cache, jnp.zeros((1,), jnp.int32), (0, 1))

    for row in range(2):
        for number in (1, 2):
            span = batch.segments[row] == number
            want = alone(jnp.asarray(batch.tokens[row][span]))
            np.testing.assert_allclose(out.hidden[row][span], want.hidden, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(out.taps[row][span], want.taps, rtol=1e-4, atol=1e-4)


def test_the_store_holds_what_is_captured_and_is_taken_up_again(packed, tmp_path):
    target, params = toy.tiny()
    seen = []
    store = fill(tmp_path / "f", packed, target, params, (1,), 4, lambda done, total: seen.append(done))
    assert seen == [4, len(packed)]
    held = sum(path.stat().st_size for path in (tmp_path / "f").iterdir() if path.suffix != ".json")
    assert held == size(packed, target.config.hidden_size, (1,))
    rows = np.array([5, 1])
    want = captured(target, (1,), params, packed.batch(rows))
    got = store.batch(rows)
    np.testing.assert_allclose(got.hidden.astype(np.float32), want.hidden, rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(got.taps.astype(np.float32), want.taps, rtol=1e-2, atol=1e-2)
    again = fill(tmp_path / "f", packed, target, params, (1,), 4, lambda done, total: pytest.fail("captured again"))
    np.testing.assert_array_equal(again.hidden, store.hidden)
    other = dataclasses.replace(packed, tokens=packed.tokens[:, ::-1].copy())
    seen.clear()
    fill(tmp_path / "f", other, target, params, (1,), 4, lambda done, total: seen.append(done))
    assert seen[-1] == len(packed)


def test_features_serve_drafters_that_read_fewer_streams(packed, tmp_path):
    target, params = toy.tiny()
    width = target.config.hidden_size
    whole = fill(tmp_path / "f", packed, target, params, (0, 1), 4)
    rows = np.array([1, 0])
    for taps, picked in (((0, 1), slice(None)), ((1,), slice(width, None)), ((), None)):
        found = take_up(tmp_path / "f", packed, width, taps).batch(rows)
        np.testing.assert_array_equal(found.hidden, whole.hidden[rows])
        if picked is None:
            assert found.taps is None
        else:
            np.testing.assert_array_equal(found.taps, whole.taps[rows][..., picked])
    assert take_up(tmp_path / "f", packed, width, (0, 2)) is None
    assert take_up(tmp_path / "nothing", packed, width, ()) is None
    manifest = tmp_path / "f" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"done": {len(packed)}', '"done": 0'))
    assert take_up(tmp_path / "f", packed, width, ()) is None
