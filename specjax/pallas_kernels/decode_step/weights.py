"""The fused step's weights: all matrices of all layers cut into tiles of one size, in the order of their use.

The kernel reads one array from its first tile to its last, whatever layer or matrix a tile belongs to, so that copies
run ahead across layer borders. A tile holds `columns` inputs of `rows` outputs, transposed: `x @ tile` is one product.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.array_types import Array, Float, Int, pytree
from specjax.pallas_kernels import dispatch
from specjax.pallas_kernels.decode_step.cut import Cut, Matrices
from specjax.pallas_kernels.tuning import choose


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Where a matrix lies among its layer's tiles: `outputs` x `inputs` tiles from tile `first` on, outputs outside."""

    name: str
    size_out: int
    size_in: int
    outputs: int
    inputs: int
    first: int

    @property
    def count(self) -> int:
        return self.outputs * self.inputs


@dataclasses.dataclass(frozen=True)
class Plan:
    """A decoder of the Llama or Qwen3 line, and how its weights are cut.

    Attributes:
        layers: decoder layers.
        hidden: model width.
        intermediate: width of the gated MLP.
        heads: query heads.
        groups: key/value heads.
        dim: width of a head.
        eps: of every RMSNorm.
        qk_norm: RMSNorm over each query and key head.
        dtype: of activations and cache, and of weights unless they are `int8`.
        rows: outputs of a tile.
        columns: inputs of a tile.
        int8: matrices are rounded to 8 bits, with a scale for each output (symmetric: its largest weight is 127).
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    groups: int
    dim: int
    eps: float
    qk_norm: bool
    dtype: str
    rows: int
    columns: int
    int8: bool = False

    @classmethod
    def of(cls, *, dtype: str, int8: bool = False, **sizes: Any) -> "Plan":
        """A plan whose tiles are of the size that a table of the device has, or the rule."""
        given = {name: sizes[name] for name in ("hidden", "intermediate", "heads", "groups", "dim")}
        matrices = Matrices(dtype=dtype, int8=int8, **given)
        cut = choose(Cut, matrices) if dispatch.platform() == "tpu" else Cut.rule(matrices)
        return cls(dtype=dtype, rows=cut.rows, columns=cut.columns, int8=int8, **sizes)

    def cut(self, cut: Cut) -> "Plan":
        """The same decoder in other tiles."""
        return dataclasses.replace(self, rows=cut.rows, columns=cut.columns)

    @property
    def sizes(self) -> Matrices:
        return Matrices(self.hidden, self.intermediate, self.heads, self.groups, self.dim, self.dtype, self.int8)

    @property
    def tile_dtype(self) -> jnp.dtype:
        return jnp.dtype("int8" if self.int8 else self.dtype)

    @functools.cached_property
    def matrices(self) -> dict[str, Matrix]:
        """The matrices of a layer in the order of their use; gate and up take turns, one row of tiles each."""
        found, first = {}, 0
        for name, size_out, size_in in self.sizes.shapes():
            outputs, inputs = -(-size_out // self.rows), -(-size_in // self.columns)
            outputs *= 2 if name == "gate_up" else 1
            found[name] = Matrix(name, size_out, size_in, outputs, inputs, first)
            first += outputs * inputs
        return found

    @property
    def tiles(self) -> int:
        """Tiles of a layer."""
        last = self.matrices["down"]
        return last.first + last.count

    @functools.cached_property
    def scales(self) -> dict[str, int]:
        """First row of each matrix among its layer's rows of scales, one a tile of outputs; `all`: how many."""
        found, first = {}, 0
        for matrix in self.matrices.values():
            found[matrix.name] = first
            first += matrix.outputs
        return found | {"all": first}

    def padded(self, *names: str) -> int:
        """Lanes of a buffer that holds inputs or outputs of these matrices, written or read in whole tiles."""
        found = [self.matrices[name] for name in names]
        halves = [m.outputs // 2 if m.name == "gate_up" else m.outputs for m in found]
        return max([n * self.rows for n in halves] + [m.inputs * self.columns for m in found])


@pytree
class Weights:
    """Weights of all layers and the final norm; the embedding and the head are the caller's.

    Attributes:
        tiles: layer after layer, `Plan.matrices` of each; `i` inputs of `o` outputs.
        scales: what each output of `int8` tiles is multiplied by, `Plan.scales` rows a layer; None without.
        norms: before attention and before the MLP.
        head_norms: of query and key heads, or None.
        final_norm: after the last layer.
    """

    tiles: Float[Array, "T i o"] | Int[Array, "T i o"]
    scales: Float[Array, "S o"] | None
    norms: Float[Array, "l 2 d"]
    head_norms: Float[Array, "l 2 f"] | None
    final_norm: Float[Array, " d"]


def pack(plan: Plan, layers: list[dict[str, Array]], final_norm: Array) -> Weights:
    """Cut the matrices of every layer into tiles.

    Args:
        plan: sizes and tiles.
        layers: of each, matrices `[out, in]` under `qkv`, `out`, `gate`, `up` and `down`, norm weights under
            `attention_norm` and `mlp_norm`, and with `plan.qk_norm` `q_norm` and `k_norm`.
        final_norm: weight of the last norm.
    """

    def layer(parts):
        """Tiles and scales of a layer, matrix after matrix."""
        cut = {name: _cut(plan, parts[name]) for name in ("qkv", "out", "gate", "up", "down")}
        pair = [jnp.stack([cut["gate"][i], cut["up"][i]], axis=1) for i in range(2)]
        order = [cut["qkv"], cut["out"], pair, cut["down"]]
        tiles = [tile.reshape(-1, plan.columns, plan.rows) for tile, _ in order]
        return tiles, [scale.reshape(-1, plan.rows) for _, scale in order]

    def both(first, second):
        return jnp.stack([jnp.stack([x[first], x[second]]) for x in layers])

    made = [layer(parts) for parts in layers]
    return Weights(
        tiles=jnp.concatenate([tile for tiles, _ in made for tile in tiles]),
        scales=jnp.concatenate([scale for _, scales in made for scale in scales]) if plan.int8 else None,
        norms=both("attention_norm", "mlp_norm"),
        head_norms=both("q_norm", "k_norm") if plan.qk_norm else None,
        final_norm=final_norm,
    )


def _cut(plan: Plan, matrix: Float[Array, "o i"]) -> tuple[Array, Array]:
    """Tiles `[O, I, columns, rows]` of a matrix, and the scales `[O, rows]` of its outputs (all 1 without `int8`)."""
    outputs, inputs = -(-matrix.shape[0] // plan.rows), -(-matrix.shape[1] // plan.columns)
    more = outputs * plan.rows - matrix.shape[0], inputs * plan.columns - matrix.shape[1]
    padded = jnp.pad(matrix, ((0, more[0]), (0, more[1])))
    scale = jnp.ones((len(padded),), jnp.float32)
    if plan.int8:
        largest = jnp.max(jnp.abs(padded.astype(jnp.float32)), axis=1)
        scale = jnp.where(largest > 0, largest / 127, 1.0)
        padded = jnp.round(padded.astype(jnp.float32) / scale[:, None]).astype(jnp.int8)
    tiles = padded.reshape(outputs, plan.rows, inputs, plan.columns).transpose(0, 2, 3, 1)
    return tiles, scale.reshape(outputs, plan.rows)


def product(plan: Plan, weights: Weights, layer: Array | int, name: str, x: Float[Array, "N i"]) -> Float[Array, "N o"]:
    """`x @ matrix.T` from the tiles, in x's dtype; `gate_up` gives gate and up behind each other."""
    matrix = plan.matrices[name]
    first = layer * plan.tiles + matrix.first
    cut = jax.lax.dynamic_slice_in_dim(weights.tiles, first, matrix.count).astype(x.dtype)
    cut = cut.reshape(-1, 2 if name == "gate_up" else 1, matrix.inputs, plan.columns, plan.rows)
    x = jnp.pad(x, ((0, 0), (0, matrix.inputs * plan.columns - x.shape[1])))
    x = x.reshape(-1, matrix.inputs, plan.columns)
    y = jnp.einsum("nic,ohicr->nhor", x, cut, preferred_element_type=jnp.float32)
    if weights.scales is not None:
        row = layer * plan.scales["all"] + plan.scales[name]
        scale = jax.lax.dynamic_slice_in_dim(weights.scales, row, matrix.outputs)
        y = y * scale.reshape(-1, cut.shape[1], plan.rows).transpose(1, 0, 2)
    y = y.astype(x.dtype)
    return y.reshape(*y.shape[:2], -1)[:, :, : matrix.size_out].reshape(len(x), -1)
