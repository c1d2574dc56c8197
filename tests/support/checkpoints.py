"""Tiny drafter checkpoints as each project publishes them: `config.json` and tensors, spelled out by hand.

They are for the target of `TARGET`: width 32, 64 tokens, 8 layers. A sample's `head` is what it must be read as.
"""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from support import toy

TARGET = toy.tiny_config(num_layers=8, windows=())
D, HEADS, KV, F, INNER, V, DRAFT_V, L = 32, 4, 2, 8, 48, 64, 16, 8

# 16 of 64 tokens, as offsets.
D2T = np.arange(0, V, 4)[:DRAFT_V] - np.arange(DRAFT_V)
T2D = np.isin(np.arange(V), np.arange(0, V, 4))


@dataclasses.dataclass
class Sample:
    """A published checkpoint in memory.

    Attributes:
        format: the name that it is detected by.
        config: its `config.json`.
        tensors: as named in its file.
        head: fields of `HeadConfig` that it must be read as.
        prefix: what precedes the names of the first layer's tensors.
    """

    format: str
    config: dict[str, Any]
    tensors: dict[str, np.ndarray]
    head: dict[str, Any]
    prefix: str = "layers.0."

    def copy(self) -> "Sample":
        return copy.deepcopy(self)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.tensors:
            safetensors.numpy.save_file(self.tensors, folder / "model.safetensors")
        return folder


LAYER = {
    "hidden_size": D,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": F,
    "rms_norm_eps": 1e-5,
    "vocab_size": V,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
}
LLAMA = LAYER | {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "transformers_version": "4.57.1",
    "tie_word_embeddings": False,
}
QWEN = LLAMA | {
    "model_type": "qwen3",
    "layer_types": ["full_attention"] * 2,
    "num_hidden_layers": 2,
    "sliding_window": None,
}


def array(name: str, *shape: int) -> np.ndarray:
    """Values that differ from tensor to tensor and are the same at every call."""
    rng = np.random.default_rng(sum(map(ord, name)) + len(name))
    base = 1.0 if "norm" in name else 0.0
    return (base + 0.2 * rng.standard_normal(shape)).astype(np.float32)


def arrays(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    return {name: array(name, *shape) for name, shape in shapes.items()}


def layer(prefix: str, wide: int = D, qk: bool = False, gate: bool = False) -> dict[str, tuple[int, ...]]:
    """Shapes of one decoder layer whose attention reads rows of width `wide`."""
    shapes = {
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (HEADS * F * (2 if gate else 1), wide),
        "self_attn.k_proj.weight": (KV * F, wide),
        "self_attn.v_proj.weight": (KV * F, wide),
        "self_attn.o_proj.weight": (D, HEADS * F),
        "mlp.gate_proj.weight": (INNER, D),
        "mlp.up_proj.weight": (INNER, D),
        "mlp.down_proj.weight": (D, INNER),
    }
    if qk:
        shapes |= {"self_attn.q_norm.weight": (F,), "self_attn.k_norm.weight": (F,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def eagle(prefix: str = "midlayer.", taps: int = 3, outer: str = "", **more) -> dict[str, np.ndarray]:
    shapes = layer(outer + prefix, wide=2 * D, **more)
    shapes |= {
        f"{outer}{prefix}hidden_norm.weight": (D,),
        f"{outer}fc.weight": (D, taps * D),
        f"{outer}norm.weight": (D,),
    }
    return arrays(shapes)


def reduced(outer: str = "") -> dict[str, np.ndarray]:
    return {f"{outer}lm_head.weight": array("lm_head.weight", DRAFT_V, D), "d2t": D2T.astype(np.int64), "t2d": T2D}


def blocks(taps: int = 2, layers: int = 2) -> dict[str, np.ndarray]:
    shapes = {"fc.weight": (D, taps * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(layers):
        shapes |= layer(f"layers.{i}.", qk=True)
    return arrays(shapes)


def full_vocabulary() -> dict[str, np.ndarray]:
    return arrays({"embed_tokens.weight": (V, D), "lm_head.weight": (V, D)})


def markov(rank: int = 8, kind: str = "vanilla", outer: str = "", vocab: int = V) -> dict[str, np.ndarray]:
    shapes = {"markov_w1.weight": (V, rank), "markov_w2.weight": (vocab, rank)}
    if kind == "gated":
        shapes |= {"gate_proj.weight": (rank, D + rank), "gate_proj.bias": (rank,)}
    if kind == "rnn":
        shapes |= {"joint_proj.weight": (3 * rank, 2 * rank + D), "joint_proj.bias": (3 * rank,)}
    return arrays({f"{outer}markov_head.{name}": shape for name, shape in shapes.items()})


def confidence(width: int, outer: str = "") -> dict[str, np.ndarray]:
    return arrays({f"{outer}confidence_head.proj.weight": (1, width), f"{outer}confidence_head.proj.bias": (1,)})


def convolutions(layers: int = 2, kernel: int = 2, group: int = 8) -> dict[str, np.ndarray]:
    shapes = {}
    for i in range(layers):
        for side in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{side}.base_kernel"] = (2, kernel, D)
            shapes[f"layers.{i}.{side}.kernel_projection.weight"] = (2 * kernel * (D // group), D)
    return arrays(shapes)


def selector(rank: int = 8) -> dict[str, np.ndarray]:
    names = ("predecessor_codebook", "successor_codebook")
    shapes = {f"candidate_selector.{name}": (V, rank) for name in names}
    return arrays(shapes | {"candidate_selector.hidden_projection.weight": (rank, D)})


def speculators(kind: str, layer_type: str, tokens: int, **more) -> dict[str, Any]:
    inner = LAYER | {"model_type": layer_type, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "transformer_layer_config": inner | more.pop("layer", {}),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "someone/toy", "architectures": ["LlamaForCausalLM"]},
        },
        **more,
    }


BLOCK_HEAD = {"num_layers": 2, "qk_norm": True, "taps": (2, 6), "block_size": 4, "mask_token_id": 60}
NESTED = {"target_layer_ids": [1, 5], "mask_token_id": 60, "block_size": 4}
REDUCED = {"draft_vocab_size": DRAFT_V, "own_head": True}
_MTP = {"own_embedding": False, "own_head": False, "taps": ()}


def samples() -> list[Sample]:
    """One checkpoint of every packaging."""
    return [*_eagles(), *_blocks(), *_speculators(), *_mtps()]


def _eagles() -> list[Sample]:
    safe = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "draft_vocab_size": DRAFT_V}
    forge = safe | {"architectures": ["LlamaForCausalLMEagle3"]}
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6], "use_aux_hidden_state": True}}
    norms = arrays({f"fc_norm.{i}.weight": (D,) for i in range(3)})
    nemo = {
        f"model.{n}" if not n.startswith(("d2t", "t2d")) else n: x for n, x in (eagle("layers.0.") | reduced()).items()
    }
    deepspec = LLAMA | {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [0, 1, 3, 5, 6],
        "ttt_length": 7,
        "step_loss_decay": 0.8,
        "draft_num_hidden_layers": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "partial_rotary_factor": 0.5,
    }
    peagle = forge | {
        "architectures": ["PEagleDraftModel"],
        "num_hidden_layers": 2,
        "num_depths": 4,
        "mask_token_id": 60,
    }
    hidden = {"mask_hidden": array("mask_hidden", 1, 1, 3 * D)} | arrays(layer("layers.1."))
    return [
        Sample("eagle3-safeailab", safe, eagle() | reduced(), {"taps": (2, 4, 5), **REDUCED}, "midlayer."),
        Sample("eagle3-specforge", forge | ids, eagle() | reduced(), {"taps": (2, 5, 7), **REDUCED}, "midlayer."),
        Sample(
            "eagle3-specforge",
            forge | ids | {"fc_norm": True, "norm_output": True},
            eagle() | norms | reduced(),
            {"taps": (2, 5, 7), "fc_norm": True, "norm_output": True, **REDUCED},
            "midlayer.",
        ),
        Sample("eagle3-specforge", safe, nemo, {"taps": (2, 4, 5), **REDUCED}, "model.layers.0."),
        Sample(
            "eagle3-deepspec",
            deepspec,
            eagle("layers.0.", taps=5, qk=True) | full_vocabulary(),
            {"taps": (1, 2, 4, 6, 7), "qk_norm": True, "own_embedding": True, "own_head": True},
        ),
        Sample(
            "peagle-specforge",
            peagle,
            eagle("layers.0.") | hidden | reduced() | arrays({"embed_tokens.weight": (V, D)}),
            {"family": "peagle", "num_layers": 2, "taps": (2, 4, 5), "depths": 4, "mask_token_id": 60, **REDUCED}
            | {"own_embedding": True},
        ),
    ]


def _blocks() -> list[Sample]:
    dflash = QWEN | {
        "architectures": ["DFlashDraftModel"],
        "num_target_layers": L,
        "auto_map": {"AutoModel": "dflash.X"},
    }
    two = QWEN | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 16,
        "use_sliding_window": True,
        "dflash_config": NESTED
        | {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4},
    }
    deepspec = QWEN | {
        "architectures": ["Qwen3DSparkModel"],
        **NESTED,
        "num_anchors": 512,
        "num_target_layers": L,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "partial_rotary_factor": 0.25,
    }
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    forge = QWEN | {
        "architectures": ["DSparkDraftModel"],
        "rope_scaling": yarn,
        "block_size": 4,
        "num_target_layers": L,
        "dflash_config": NESTED
        | {"projector_type": "dspark", "markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True}
        | {"attention_mode": "gqa"},
    }
    liquid = QWEN | {
        "architectures": ["Lfm2DSparkDraftModel"],
        "model_type": "lfm2",
        "dflash_config": NESTED | {"markov_rank": 8, "markov_head_type": "rnn"},
    }
    tree = QWEN | {
        "architectures": ["UBTreeDraftModel"],
        "dflash_config": NESTED | {"selector_rank": 8, "codebook_hidden": 12, "selector_top_k": 6},
        "tree_config": {"budget": 10, "width": 3, "depth_bonus": 0.5},
    }
    books = arrays(
        {
            f"bigram_selector.{side}.{n}.weight": s
            for side in ("phi", "psi")
            for n, s in (("fc1", (12, D)), ("fc2", (8, 12)))
        }
        | {"bigram_selector.hidden_projection.weight": (8, D)}
        | {"bigram_selector.log_alpha": (3,), "bigram_selector.log_lambda": (3,)}
    )
    head, shifted = BLOCK_HEAD | {"block_causal": (False, False)}, {"shifted": True}
    spark = {"family": "dspark", "markov_rank": 8, "confidence": True, **shifted}
    return [
        Sample("dflash-zlab", dflash | {"block_size": 4, "dflash_config": NESTED}, blocks(), head),
        Sample(
            "dflash2-zlab",
            two,
            blocks() | convolutions() | selector(),
            head | {"windows": (16, 16), "conv_kernel": 2, "conv_group": 8, "selector_rank": 8, "selector_top_k": 4},
        ),
        Sample(
            "dspark-deepspec",
            deepspec,
            blocks() | full_vocabulary() | markov() | confidence(D + 8),
            head | spark | {"own_embedding": True, "own_head": True},
        ),
        Sample(
            "dspark-deepspec",
            deepspec | {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
            blocks() | full_vocabulary(),
            head
            | shifted
            | {"family": "dflash", "own_embedding": True, "own_head": True, "confidence_with_markov": False},
        ),
        Sample(
            "dspark-specforge",
            forge,
            blocks() | markov(kind="gated", outer="logit_head.") | confidence(D, outer="logit_head."),
            head | spark | {"markov": "gated", "confidence_with_markov": False},
        ),
        Sample(
            "dspark-liquid",
            liquid,
            blocks() | markov(kind="rnn"),
            head
            | spark
            | {"markov": "rnn", "confidence": False, "confidence_with_markov": False, "rope_interleaved": True},
        ),
        Sample(
            "ubtree",
            tree,
            blocks() | books,
            head
            | {"selector_rank": 8, "selector_top_k": 6, "codebook_hidden": 12}
            | {"tree_budget": 10, "tree_width": 3, "depth_bonus": 0.5},
        ),
    ]


def _speculators() -> list[Sample]:
    eagle_keys = {
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "draft_vocab_size": DRAFT_V,
        "norm_before_residual": True,
    }
    two = {"layer": {"num_hidden_layers": 2}}
    block_keys = {
        "aux_hidden_state_layer_ids": [2, 6, L],
        "block_size": 4,
        "mask_token_id": 60,
        "draft_vocab_size": V,
        **two,
    }
    mtp = arrays(
        layer("mtp_layers.0.", qk=True)
        | {"mtp_layers.0.input_proj.weight": (D, 2 * D)}
        | {f"mtp_layers.0.{n}_layernorm.weight": (D,) for n in ("hidden", "token", "final")}
    )
    head = BLOCK_HEAD | {"block_causal": (False, False)}
    flash2 = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 4}
    # Older heads omit sample_from_anchor; block_size - speculative_tokens tells.
    spark = {"markov_rank": 8, "draft_vocab_size": DRAFT_V}
    return [
        Sample(
            "speculators-eagle3",
            speculators("eagle3", "qwen3", 3, **eagle_keys, norm_before_fc=True),
            eagle("layers.0.", qk=True) | reduced() | arrays({"input_norm.weight": (3 * D,)}),
            {"taps": (2, 4, 5), "qk_norm": True, "norm_before_residual": True, "norm_before_fc": True, **REDUCED},
        ),
        Sample(
            "speculators-peagle",
            speculators("peagle", "llama", 3, **eagle_keys, mask_token_id=60),
            eagle("layers.0.") | reduced() | {"mask_hidden": array("mask_hidden", 1, 1, 3 * D)},
            {
                "family": "peagle",
                "taps": (2, 4, 5),
                "norm_before_residual": True,
                "depths": 3,
                "mask_token_id": 60,
                **REDUCED,
            },
        ),
        Sample(
            "speculators-mtp",
            speculators("mtp", "qwen3", 3, num_nextn_predict_layers=1),
            mtp,
            {"family": "mtp", "qk_norm": True, **_MTP},
            "mtp_layers.0.",
        ),
        Sample(
            "speculators-dflash",
            speculators("dflash", "qwen3", 3, **block_keys, sample_from_anchor=False),
            blocks(),
            head | {"family": "dflash"},
        ),
        Sample(
            "speculators-dflash2",
            speculators("dflash2", "qwen3", 3, **block_keys, **flash2),
            blocks() | convolutions() | selector(),
            head | {"family": "dflash2", "conv_kernel": 2, "conv_group": 8, "selector_rank": 8, "selector_top_k": 4},
        ),
        Sample(
            "speculators-dspark",
            speculators("dspark", "qwen3", 3, **(block_keys | spark)),
            blocks() | markov(vocab=DRAFT_V) | confidence(D + 8) | reduced(),
            head | {"family": "dspark", "shifted": False, "markov_rank": 8, "confidence": True, **REDUCED},
        ),
    ]


def _mtps() -> list[Sample]:
    base = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,), "lm_head.weight": (V, D)}
    for i in range(L):
        base |= layer(f"model.layers.{i}.")
    target = LLAMA | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": L}
    last = f"model.layers.{L}."
    deepseek = layer(last) | {f"{last}{n}.weight": (D,) for n in ("enorm", "hnorm", "shared_head.norm")}
    deepseek |= {f"{last}eh_proj.weight": (D, 2 * D)}
    deepseek |= {f"{last}{n}.weight": (V, D) for n in ("embed_tokens", "shared_head.head")}
    qwen = layer("mtp.layers.0.", qk=True, gate=True) | {"mtp.fc.weight": (D, 2 * D)}
    qwen |= {f"mtp.{n}.weight": (D,) for n in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    mimo = layer("model.mtp_layers.0.") | {"model.mtp_layers.0.input_proj.weight": (D, 2 * D)}
    mimo |= {f"model.mtp_layers.0.{n}_layernorm.weight": (D,) for n in ("token", "hidden", "final")}
    biases = {f"model.mtp_layers.0.self_attn.{x}_proj.bias": (n * F,) for x, n in (("q", HEADS), ("k", KV), ("v", KV))}
    gated = {"qk_norm": True, "norm_offset": True, "attention_gate": True, "rotary_dims": 4}
    half = target | {"num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5}
    return [
        Sample("mtp-deepseek", target | {"num_nextn_predict_layers": 1}, arrays(base | deepseek), _MTP, last),
        Sample("mtp-qwen", half, arrays(base | qwen), _MTP | gated, "mtp.layers.0."),
        Sample(
            "mtp-mimo",
            target | {"num_nextn_predict_layers": 1},
            arrays(base | mimo | biases),
            _MTP | {"hidden_first": True, "attention_bias": True},
            "model.mtp_layers.0.",
        ),
    ]
