"""Attention over a shared text and keys of one's own: what a dense softmax gives, values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax.training.attention import attend


def dense(q, keys, values, seen, near, near_values):
    """All heads at once, in the plainest way."""
    ratio = q.shape[2] // keys.shape[2]
    keys, values = (jnp.repeat(x, ratio, axis=2) for x in (keys, values))
    scores = jnp.where(seen[:, :, None], jnp.einsum("bthf,bshf->bths", q, keys), -1e30)
    weights = jax.nn.softmax(jnp.concatenate([scores, near], axis=-1))
    size = keys.shape[1]
    far = jnp.einsum("bths,bshf->bthf", weights[..., :size], values)
    return far + jnp.einsum("bthm,bthmf->bthf", weights[..., size:], near_values)


def test_is_the_dense_softmax():
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    q, keys, values = normal(2, 7, 6, 4), normal(2, 9, 3, 4), normal(2, 9, 3, 4)
    seen = jnp.asarray(rng.random((2, 7, 9)) < 0.5)
    near, near_values = normal(2, 7, 6, 2).at[0, 1, 2, 0].set(-1e30), normal(2, 7, 6, 2, 4)

    def ours(*args):
        q, keys, values, near, near_values = args
        out, weights = attend(q, keys, values, seen, near)
        return out + jnp.einsum("bthm,bthmf->bthf", weights, near_values)

    def theirs(*args):
        q, keys, values, near, near_values = args
        return dense(q, keys, values, seen, near, near_values)

    args = (q, keys, values, near, near_values)
    np.testing.assert_allclose(ours(*args), theirs(*args), atol=1e-5)
    pull = normal(2, 7, 6, 4)
    mine, wanted = (jax.grad(lambda *a, f=f: (f(*a) * pull).sum(), argnums=range(5))(*args) for f in (ours, theirs))
    for a, b in zip(mine, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_rows_without_keys_of_their_own():
    x = jnp.ones((1, 4, 2, 4))
    seen = jnp.tril(jnp.ones((1, 4, 4), bool))
    out, weights = attend(x, x, x, seen, jnp.zeros((1, 4, 2, 0)))
    np.testing.assert_allclose(out, x, atol=1e-6)
    assert weights.shape == (1, 4, 2, 0)
