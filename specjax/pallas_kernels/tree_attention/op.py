"""Tree attention as targets and drafters call it: the reference's two functions, on the backend that dispatch picks."""

from specjax.array_types import Array, Bool, Float, Int
from specjax.draft import Rows
from specjax.pallas_kernels import dispatch


def tree_attention(
    q: Float[Array, "N h f"],
    k: Float[Array, "N g f"],
    v: Float[Array, "N g f"],
    k_pages: Float[Array, "p g s f"],
    v_pages: Float[Array, "p g s f"],
    table: Int[Array, "b m"] | None,
    committed: Int[Array, " b"],
    rows: Rows,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "N h f"]:
    """`reference.tree_attention`: packed draft rows over committed slots and their own ancestors."""
    options = {"scale": scale, "window": window, "softcap": softcap}
    args = (q, k, v, k_pages, v_pages, table, committed, rows)
    return dispatch.call("tree_attention", "tree_attention", *args, **options)


def attend(
    q: Float[Array, "b n h f"],
    k: Float[Array, "b j g f"],
    v: Float[Array, "b j g f"],
    seen: Bool[Array, "b n j"],
    k_pages: Float[Array, "p g s f"],
    v_pages: Float[Array, "p g s f"],
    table: Int[Array, "b m"] | None,
    committed: Int[Array, " b"],
    position: Int[Array, "b n"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Float[Array, "b n h f"]:
    """`reference.attend`: queries over committed slots and a tile of further keys under an explicit mask."""
    options = {"scale": scale, "window": window, "softcap": softcap}
    args = (q, k, v, seen, k_pages, v_pages, table, committed, position)
    return dispatch.call("tree_attention", "attend", *args, **options)
