"""One internal description for every learned drafter, whatever file format it came in."""

import dataclasses
from typing import Literal

from specjax.targets.config import RopeConfig

Family = Literal["eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark", "ubtree"]
RECURRENT: tuple[Family, ...] = ("eagle3", "peagle", "mtp")
BLOCK: tuple[Family, ...] = ("dflash", "dflash2", "dspark", "ubtree")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The shape and the arithmetic of a learned drafter.

    `t` counts target layers already executed: a tap of `t` is the residual stream after `t` layers (0: the embedding).

    Attributes:
        family: what kind of drafter.
        num_layers: decoder layers of the drafter.
        hidden_size: its width.
        intermediate_size: width of its gated MLP.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        rms_norm_eps: epsilon of its norms.
        rope: its rotation.
        rope_interleaved: rotate neighbouring pairs instead of halves.
        rotary_dims: leading dimensions of a head that rotate, the rest pass (Qwen3-Next, GLM); None rotates all.
        qk_norm: per-head norms on queries and keys.
        attention_bias: biases on q, k and v.
        norm_offset: norms multiply by `1 + w` instead of `w`.
        attention_gate: queries carry an output gate (Qwen3-Next and later): q_proj holds [q, gate] per head.
        windows: sliding window of each layer, None for full attention.
        vocab_size: tokens of the target.
        draft_vocab_size: tokens of the drafter's head; smaller than `vocab_size` needs the `d2t` table.
        target_hidden_size: width of the target.
        taps: residual streams that it reads, ascending.
        own_embedding: it ships an embedding; otherwise the target's is used.
        own_head: it ships an output head; otherwise the target's is used.
        embedding_scale: factor on embedding rows.
        output_multiplier: factor on logits.
        logit_softcap: logits become `cap * tanh(logits / cap)`.
        head_rank: rank of the low-rank candidate head, 0 for none (the full head scores every token).
        head_candidates: tokens that the low-rank scores select for exact rescoring.
        acceptance: how often each draft of a greedy chain is accepted once those before it are, by whoever trained the
            drafter; a planner starts from it. Empty where the files do not say.

        fc_norm: (eagle3) a norm on each tap before `fc`.
        norm_before_fc: (eagle3) one norm over the concatenated taps before `fc`.
        norm_before_residual: (eagle3) the normed features are the residual, not the raw ones.
        norm_output: (eagle3) feed back the normed output instead of the raw one.
        mask_token_id: (peagle, block drafters) token of positions that are not known yet.
        depths: (peagle) positions predicted at once.

        hidden_first: (mtp) the fuse matrix reads [hidden, embedding] instead of [embedding, hidden].
        hidden_normed: (mtp) the target's hidden states are taken after its final norm (otherwise the last residual).
        feedback_normed: (mtp) later steps get the module's output after its own final norm.
        blank_start: (mtp) the row of position 0 reads no token, as vLLM serves modules; they are trained without.

        block_size: (block) rows of a block, the anchor included.
        shifted: (block) row j predicts the token after its own position, so a block of B rows makes B drafts; otherwise
            row j predicts its own position and the anchor's row makes none: B - 1 drafts.
        block_causal: (block) whether rows of a block see only earlier ones, for each layer.
        conv_kernel: (dflash2) taps of the dynamic convolutions, 0 for none.
        conv_group: (dflash2) channels that share a dynamic kernel.
        selector_rank: (dflash2, ubtree) rank of the candidate selector.
        selector_top_k: (dflash2, ubtree) candidates of a position.
        codebook_hidden: (ubtree) hidden width of the codebook networks.
        tree_budget: (ubtree) drafted nodes kept, the root not counted.
        tree_width: (ubtree) beam width of the supertree.
        depth_bonus: (ubtree) added to a node's score for each level.
        markov_rank: (dspark) rank of the Markov head, 0 for none.
        markov: (dspark) kind of Markov head.
        confidence: (dspark) it has a confidence head.
        confidence_with_markov: (dspark) the confidence head also reads the previous token's Markov embedding.
    """

    family: Family
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    rope_interleaved: bool = False
    rotary_dims: int | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    norm_offset: bool = False
    attention_gate: bool = False
    windows: tuple[int | None, ...] = ()
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...] = ()
    own_embedding: bool = False
    own_head: bool = False
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    logit_softcap: float | None = None
    head_rank: int = 0
    head_candidates: int = 64
    acceptance: tuple[float, ...] = ()
    # eagle3, peagle
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    depths: int = 0
    # mtp
    hidden_first: bool = False
    hidden_normed: bool = True
    feedback_normed: bool = True
    blank_start: bool = False
    # block drafters
    block_size: int = 0
    shifted: bool = False
    block_causal: tuple[bool, ...] = ()
    conv_kernel: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    codebook_hidden: int = 0
    tree_budget: int = 0
    tree_width: int = 0
    depth_bonus: float = 0.0
    markov_rank: int = 0
    markov: Literal["vanilla", "gated", "rnn"] = "vanilla"
    confidence: bool = False
    confidence_with_markov: bool = True


def expected_tensors(c: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Canonical tensor names of a drafter and their shapes, matrices `[out, in]`.

    The names are those of the published formats, with `layers.N.` for every decoder layer and no prefix before it.
    """
    d, e = c.hidden_size, c.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(c.num_layers):
        wide = 2 * d if c.family in ("eagle3", "peagle") and i == 0 else d
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer(c, wide).items()}
        if c.family in ("eagle3", "peagle") and i == 0:
            shapes[f"layers.{i}.hidden_norm.weight"] = (d,)
        if c.conv_kernel:
            for side in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{side}.base_kernel"] = (2, c.conv_kernel, d)
                shapes[f"layers.{i}.{side}.kernel_projection.weight"] = (2 * c.conv_kernel * (d // c.conv_group), d)
    shapes["norm.weight"] = (d,)
    if c.family == "mtp":
        shapes |= {"fuse.weight": (d, d + e), "embedding_norm.weight": (d,), "hidden_norm.weight": (e,)}
    else:
        shapes["fc.weight"] = (d, len(c.taps) * e)
    if c.family in BLOCK:
        shapes["hidden_norm.weight"] = (d,)
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (e,) for i in range(len(c.taps))}
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (len(c.taps) * e,)
    if c.family == "peagle":
        shapes["mask_hidden"] = (len(c.taps) * e,)
    if c.own_embedding:
        shapes["embed_tokens.weight"] = (c.vocab_size, d)
    if c.own_head:
        shapes["lm_head.weight"] = (c.draft_vocab_size, d)
    if c.draft_vocab_size != c.vocab_size:
        shapes["d2t"] = (c.draft_vocab_size,)
    if c.head_rank:
        shapes |= {
            "candidate_head.down.weight": (c.head_rank, d),
            "candidate_head.up.weight": (c.draft_vocab_size, c.head_rank),
            "candidate_head.lift.weight": (d, c.head_rank),
        }
    if c.family == "dflash2":
        shapes |= {
            "candidate_selector.hidden_projection.weight": (c.selector_rank, d),
            "candidate_selector.predecessor_codebook": (c.vocab_size, c.selector_rank),
            "candidate_selector.successor_codebook": (c.vocab_size, c.selector_rank),
        }
    if c.family == "ubtree":
        drafts = c.block_size if c.shifted else c.block_size - 1
        for side in ("phi", "psi"):
            shapes[f"bigram_selector.{side}.fc1.weight"] = (c.codebook_hidden, e)
            shapes[f"bigram_selector.{side}.fc2.weight"] = (c.selector_rank, c.codebook_hidden)
        shapes["bigram_selector.hidden_projection.weight"] = (c.selector_rank, d)
        shapes |= {"bigram_selector.log_alpha": (drafts,), "bigram_selector.log_lambda": (drafts,)}
    if c.family == "dspark" and c.markov_rank:
        r = c.markov_rank
        shapes |= {
            "markov_head.markov_w1.weight": (c.vocab_size, r),
            "markov_head.markov_w2.weight": (c.draft_vocab_size, r),
        }
        if c.markov == "gated":
            shapes |= {"markov_head.gate_proj.weight": (r, d + r), "markov_head.gate_proj.bias": (r,)}
        if c.markov == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + d), "markov_head.joint_proj.bias": (3 * r,)}
    if c.confidence:
        width = d + (c.markov_rank if c.confidence_with_markov else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _layer(c: HeadConfig, wide: int) -> dict[str, tuple[int, ...]]:
    """One decoder layer whose attention reads rows of width `wide`."""
    d, f = c.hidden_size, c.head_dim
    q = c.num_heads * f * (2 if c.attention_gate else 1)
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (d,),
        "post_attention_layernorm.weight": (d,),
        "self_attn.q_proj.weight": (q, wide),
        "self_attn.k_proj.weight": (c.num_kv_heads * f, wide),
        "self_attn.v_proj.weight": (c.num_kv_heads * f, wide),
        "self_attn.o_proj.weight": (d, c.num_heads * f),
        "mlp.gate_proj.weight": (c.intermediate_size, d),
        "mlp.up_proj.weight": (c.intermediate_size, d),
        "mlp.down_proj.weight": (d, c.intermediate_size),
    }
    if c.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (f,), "self_attn.k_norm.weight": (f,)}
    if c.attention_bias:
        shapes |= {f"self_attn.{x}_proj.bias": (shapes[f"self_attn.{x}_proj.weight"][0],) for x in "qkv"}
    return shapes
