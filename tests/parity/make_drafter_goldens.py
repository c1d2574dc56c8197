"""Write `goldens/drafters/` with the packages that publish drafters: speculators, specforge and dflash. See README.md.

    python make_drafter_goldens.py [case ...]

Each case is a tiny random drafter, saved as its package saves it, and what the package's own modules compute with it.
Nothing of specjax is imported.
"""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the modules are tiny: compiling them takes longer than running them

import json
import platform
import shutil
import sys
import types
from importlib.metadata import version
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
import transformers
from transformers import LlamaConfig, Qwen3Config

# speculators.train.data reads data sets with two large libraries; the models take one type alias from it.
sys.modules["speculators.train.data"] = types.ModuleType("speculators.train.data")
sys.modules["speculators.train.data"].BatchType = dict

import dflash.model as dflash  # noqa: E402
import speculators  # noqa: E402
from specforge.modeling.draft.dspark import DSparkDraftModel as ForgeDSpark  # noqa: E402
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3  # noqa: E402
from speculators.models.peagle import core as peagle_core  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

HERE = Path(__file__).parent / "goldens" / "drafters"
V, DRAFT_V, D, TARGET_LAYERS = 48, 12, 16, 8
ROWS, DRAFTS = 9, 3  # positions with features (the root comes after them), and drafts of a recurrent head
D2T = torch.arange(0, V, 4) - torch.arange(DRAFT_V)
T2D = torch.isin(torch.arange(V), torch.arange(0, V, 4))

LAYER = {
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def rng(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(sum(map(ord, name)))


def fill(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """Random weights: norms near 1 (near 0 would do for `1 + w` ones too), the rest wide enough for clear winners."""
    generator = rng(name)
    model = model.float().eval()
    with torch.no_grad():
        for key, weight in sorted(model.named_parameters()):
            values = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * values if "norm" in key or "base_kernel" in key else 0.3 * values)
    return model


def inputs(name: str, width: int) -> dict[str, torch.Tensor]:
    """What the target gives: embedding, head, tokens, and features of every position before the root."""
    generator = rng(name + " inputs")
    return {
        "embedding": torch.randn(V, D, generator=generator),
        "head": torch.randn(V, D, generator=generator),
        "tokens": torch.randint(V, (ROWS + 1,), generator=generator),
        "features": torch.randn(ROWS, width, generator=generator),
    }


def save(name: str, model, **arrays) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.save_pretrained(folder)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
        else:
            path.chmod(0o644)
    np.savez(folder / "golden.npz", **{k: np.asarray(torch.as_tensor(v).detach()) for k, v in arrays.items()})


def pickled(name: str) -> None:
    """The tensors of a case once more, as `torch.save` writes a state dict; one is a view, one a parameter."""
    state = torch.nn.Module().state_dict()  # an OrderedDict with metadata
    state |= safetensors.torch.load_file(HERE / name / "model.safetensors")
    state["fc.weight"] = state["fc.weight"].t().contiguous().t()
    state["norm.weight"] = torch.nn.Parameter(state["norm.weight"])
    torch.save(state, HERE / name / "pytorch_model.bin")


class Tape:
    """Records what a module returns."""

    def __init__(self, module: torch.nn.Module):
        self.outputs: list[torch.Tensor] = []
        module.register_forward_hook(lambda module, args, output: self.outputs.append(output.detach()))


def target_ids(drafts: torch.Tensor, reduced: bool) -> torch.Tensor:
    return drafts + D2T[drafts] if reduced else drafts


def about(kind: str, tokens: int) -> speculators.SpeculatorsConfig:
    return speculators.SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=speculators.VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
    )


def unroll(step, given: dict, reduced: bool) -> dict:
    """A greedy chain after the root, found with training passes.

    `step(tokens, features, count)` returns the logits of `count` training-time-test steps, `[count, rows, v]`. In step
    s, row i stands for the draft s places after row i: it sees the rows up to i and its own earlier steps, and its
    token is that of row i + s. So the tokens after the root must be the drafts, which are found one by one.
    """
    drafts: list[int] = []
    for count in range(1, DRAFTS + 1):
        tokens = torch.cat([given["tokens"][1:], torch.tensor(drafts, dtype=torch.long)])
        features = torch.cat([given["features"], torch.randn(len(drafts), given["features"].shape[1])])
        logits = step(tokens[None], features[None], count)
        drafts.append(int(target_ids(logits[-1][ROWS - 1].argmax(), reduced)))
    return {
        "logits": logits[0][:ROWS],
        "chain_logits": torch.stack([x[ROWS - 1] for x in logits]),
        "drafts": torch.tensor(drafts),
    }


# --- EAGLE-3 ---------------------------------------------------------------------------------------------------------


def speculators_eagle3(name: str, kind: str, reduced: bool = True, **flags) -> None:
    layer = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**LAYER)
    config = speculators.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_V if reduced else V,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=about("eagle3", DRAFTS),
        **flags,
    )
    model = fill(speculators.Eagle3DraftModel(config), name)
    given = inputs(name, 3 * D)
    if reduced:
        model.load_vocab_mappings(T2D, D2T)
    tape = Tape(model.lm_head)

    def step(tokens, features, count):
        tape.outputs.clear()
        model(features, tokens, torch.zeros_like(tokens), ttt_steps=count)
        return [x[0] for x in tape.outputs]

    save(name, model, **given, **unroll(step, given, reduced))


def specforge_eagle3(name: str, **flags) -> None:
    config = LlamaConfig(**LAYER, pretraining_tp=1, rope_theta=10000.0)
    config.draft_vocab_size = DRAFT_V
    config.architectures = ["LlamaForCausalLMEagle3"]
    config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}
    for key, value in flags.items():
        setattr(config, key, value)
    model = fill(LlamaForCausalLMEagle3(config), name)
    model.d2t.copy_(D2T)
    model.t2d.copy_(T2D)
    given = inputs(name, 3 * D)

    def step(tokens, features, count):
        rows, cache, out = tokens.shape[1], [[], []], []
        hidden = model.project_hidden_states(features)
        mask = model.prepare_decoder_attention_mask(torch.ones_like(tokens).bool(), hidden, 1, rows, 0)
        for s in range(count):
            shifted = torch.nn.functional.pad(tokens[:, s:], (0, s))
            hidden = model.backbone(model.embed_input_ids(shifted), hidden, cache, mask, torch.arange(rows)[None])
            out.append(model.compute_logits(hidden)[0].detach())
        return out

    save(name, model, **given, **unroll(step, given, True))
    if not flags:
        pickled(name)


def speculators_peagle(name: str) -> None:
    config = speculators.PEagleSpeculatorConfig(
        transformer_layer_config=LlamaConfig(**(LAYER | {"num_hidden_layers": 2})),
        draft_vocab_size=DRAFT_V,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        mask_token_id=V - 1,
        speculators_config=about("peagle", DRAFTS),
    )
    model = fill(speculators.PEagleDraftModel(config), name)
    model.load_vocab_mappings(T2D, D2T)
    given = inputs(name, 3 * D)
    # Every anchor at every depth; behind the last row with features stand rows that the masks only need room for.
    rows = ROWS + DRAFTS - 1
    anchors = torch.cat([torch.arange(rows), torch.full((DRAFTS - 1,), ROWS - 1)])
    depths = torch.cat([torch.zeros(rows, dtype=torch.long), torch.arange(1, DRAFTS)])
    peagle_core.generate_cod_sample_indices = lambda **_: (anchors, depths)
    peagle_core.compute_metrics = lambda **_: (None, None)
    tape = Tape(model.lm_head)
    tokens = torch.cat([given["tokens"][1:], torch.zeros(DRAFTS - 1, dtype=torch.long)])[None]
    features = torch.cat([given["features"], torch.zeros(DRAFTS - 1, 3 * D)])[None]
    model(features, tokens, torch.zeros_like(tokens), verifier_last_hidden_states=torch.zeros(1, rows, D))
    logits = tape.outputs[0][0]
    chain = torch.cat([logits[ROWS - 1 : ROWS], logits[rows:]])
    save(name, model, **given, logits=logits[:ROWS], chain_logits=chain, drafts=target_ids(chain.argmax(-1), True))


# --- MTP -------------------------------------------------------------------------------------------------------------


def speculators_mtp(name: str, kind: str) -> None:
    layer = Qwen3Config(**LAYER)
    if kind == "qwen3_5_text":
        rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}
        layer = transformers.AutoConfig.for_model(kind, **LAYER, layer_types=["full_attention"], rope_parameters=rope)
    config = speculators.MTPSpeculatorConfig(transformer_layer_config=layer, speculators_config=about("mtp", 1))
    model = fill(speculators.MTPDraftModel(config), name)
    given = inputs(name, D)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(given["embedding"])
        model.lm_head.weight.copy_(given["head"])
    del model.verifier_lm_head  # as the package does once the verifier's weights are there
    layer_out = Tape(model.mtp_layers[0])
    # Its last row needs a token to be compared with, which no logits depend on.
    tokens = torch.cat([given["tokens"], torch.zeros(1, dtype=torch.long)])[None]
    features = torch.cat([given["features"], torch.zeros(2, D)])[None]
    logits = model(tokens, features)[0][0][0].detach()
    drafts = logits[ROWS - 1 :].argmax(-1)
    save(
        name,
        model,
        **given,
        logits=logits,
        chain_logits=logits[ROWS - 1 :],
        drafts=drafts,
        feedback=layer_out.outputs[0][0],
    )


# --- block drafters --------------------------------------------------------------------------------------------------

BLOCK, MASK = 4, V - 1
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}


def block_config(name: str, nested: dict, **changes) -> Qwen3Config:
    config = Qwen3Config(**(LAYER | {"num_hidden_layers": 2} | changes))
    config.architectures = [name]
    config.num_target_layers = TARGET_LAYERS
    config.block_size = BLOCK
    config.dflash_config = {"target_layer_ids": [1, 5], "mask_token_id": MASK, "block_size": BLOCK, **nested}
    return config


def block_pass(model, given: dict) -> torch.Tensor:
    """Hidden rows of one block `[anchor, MASK, ...]` after all rows with features."""
    block = torch.cat([given["tokens"][-1:], torch.full((BLOCK - 1,), MASK)])
    with torch.no_grad():
        hidden = model(
            position_ids=torch.arange(ROWS + BLOCK)[None],
            noise_embedding=given["embedding"][block][None],
            target_hidden=given["features"][None],
        )
    return hidden[0]


def head_of(given: dict) -> torch.nn.Linear:
    head = torch.nn.Linear(D, V, bias=False)
    head.weight.data.copy_(given["head"])
    return head


def zlab_dflash(name: str, nested: dict | None = None, **changes) -> None:
    config = block_config("DFlashDraftModel", nested or {}, **changes)
    model = fill(dflash.DFlashDraftModel(config), name)
    given = inputs(name, 2 * D)
    if "input_embedding_scale" in config.dflash_config:
        scaled = given | {"embedding": given["embedding"] * config.dflash_config["input_embedding_scale"]}
    else:
        scaled = given
    hidden = block_pass(model, scaled)[1:]
    logits = model.compute_logits(hidden, head_of(given)).detach()
    save(name, model, **given, hidden=hidden, logits=logits, drafts=logits.argmax(-1))


def zlab_dflash2(name: str) -> None:
    nested = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
    sliding = {
        "layer_types": ["sliding_attention"] * 2,
        "use_sliding_window": True,
        "sliding_window": 6,
        "is_causal": False,
    }
    model = fill(dflash.DFlash2DraftModel(block_config("DFlash2DraftModel", nested, **sliding)), name)
    given = inputs(name, 2 * D)
    hidden = block_pass(model, given)[1:]
    drafts = model.propose(hidden[None], given["tokens"][-1:], head_of(given), 0.0)[0][0]
    save(name, model, **given, hidden=hidden, logits=model.compute_logits(hidden, head_of(given)), drafts=drafts)


def specforge_dspark(name: str, kind: str, **changes) -> None:
    nested = {"projector_type": "dspark", "markov_rank": 6, "markov_head_type": kind, "enable_confidence_head": True}
    nested["confidence_head_with_markov"] = kind != "gated"
    model = fill(ForgeDSpark(block_config("DSparkDraftModel", nested, **changes)), name)
    given = inputs(name, 2 * D)
    hidden = block_pass(model, given)
    base = head_of(given)(hidden)[None]
    drafts, logits = model.markov_head.sample_block_tokens(
        base, first_prev_token_ids=given["tokens"][-1:], hidden_states=hidden[None]
    )
    before = torch.cat([given["tokens"][-1:], drafts[0, :-1]])[None]
    confidence = model.predict_confidence(hidden[None], prev_token_ids=before)[0]
    save(
        name,
        model,
        **given,
        hidden=hidden,
        logits=base[0],
        walk_logits=logits[0],
        drafts=drafts[0],
        confidence=confidence,
    )


def speculators_block(name: str, kind: str, markov: str = "vanilla", **changes) -> None:
    """One anchor, the root, behind the rows with features."""
    classes = {"dflash": speculators.DFlashDraftModel, "dspark": speculators.DSparkDraftModel}
    configs = {"dflash": speculators.DFlashSpeculatorConfig, "dspark": speculators.DSparkSpeculatorConfig}
    more = {"markov_rank": 6, "markov_head_type": markov, "draft_vocab_size": DRAFT_V} if kind == "dspark" else {}
    config = configs[kind](
        transformer_layer_config=Qwen3Config(**(LAYER | {"num_hidden_layers": 2})),
        **({"draft_vocab_size": V} | more),
        block_size=BLOCK,
        mask_token_id=MASK,
        aux_hidden_state_layer_ids=[2, 6],
        speculators_config=about(kind, BLOCK if kind == "dspark" else BLOCK - 1),
        **changes,
    )
    model = fill(classes[kind](config), name)
    reduced = kind == "dspark"
    if reduced:
        model.load_vocab_mappings(T2D, D2T)
    given = inputs(name, 2 * D)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(given["embedding"])
        if not reduced:
            model.lm_head.weight.copy_(given["head"])
    rows = ROWS + 2 * BLOCK  # an anchor is never among the last rows of a block
    tokens = torch.cat([given["tokens"], torch.zeros(rows - ROWS - 1, dtype=torch.long)])[None]
    features = torch.cat([given["features"], torch.randn(rows - ROWS, 2 * D)])[None]
    anchor = torch.zeros(1, rows)
    anchor[0, ROWS] = 1
    with torch.no_grad():
        hidden, logits, *_ = model._backbone_forward(
            features, tokens, anchor, torch.zeros(1, rows, D), torch.zeros_like(tokens), max_anchors=1
        )
    hidden, logits = hidden[0], logits[0]
    if not reduced:
        hidden, logits = hidden[1:], logits[1:]
        save(name, model, **given, hidden=hidden, logits=logits, drafts=logits.argmax(-1))
        return
    before = [int(given["tokens"][-1])]
    for k in range(BLOCK):  # the block's bias at step k needs the tokens up to k alone
        padded = torch.tensor(before + [0] * (BLOCK - 1 - k))[None]
        walk = logits + model.markov_head.block_bias(prev_token_ids=padded, hidden_states=hidden[None])[0]
        before.append(int(target_ids(walk[k].argmax(), True)))
    previous = model.markov_head.prev_embeddings(torch.tensor(before[:-1]))
    confidence = model.confidence_head(torch.cat([hidden, previous], -1))
    save(
        name,
        model,
        **given,
        hidden=hidden,
        logits=logits,
        walk_logits=walk,
        drafts=torch.tensor(before[1:]),
        confidence=confidence,
    )


CASES = {
    "eagle3-speculators-llama": lambda name: speculators_eagle3(name, "llama"),
    "eagle3-speculators-qwen3": lambda name: speculators_eagle3(
        name, "qwen3", reduced=False, norm_before_residual=True
    ),
    "eagle3-speculators-fc-norm": lambda name: speculators_eagle3(name, "llama", fc_norm=True, norm_output=True),
    "eagle3-speculators-input-norm": lambda name: speculators_eagle3(name, "llama", norm_before_fc=True),
    "eagle3-specforge": specforge_eagle3,
    "eagle3-specforge-fc-norm": lambda name: specforge_eagle3(name, fc_norm=True),
    "peagle-speculators": speculators_peagle,
    "mtp-speculators-qwen3": lambda name: speculators_mtp(name, "qwen3"),
    "mtp-speculators-qwen3-5": lambda name: speculators_mtp(name, "qwen3_5_text"),
    "dflash-zlab": zlab_dflash,
    "dflash-zlab-window": lambda name: zlab_dflash(
        name,
        {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 3.0},
        layer_types=["sliding_attention", "full_attention"],
        use_sliding_window=True,
        sliding_window=6,
    ),
    "dflash2-zlab": zlab_dflash2,
    "dspark-specforge-vanilla": lambda name: specforge_dspark(name, "vanilla"),
    "dspark-specforge-gated": lambda name: specforge_dspark(name, "gated"),
    "dspark-specforge-rnn-yarn": lambda name: specforge_dspark(name, "rnn", rope_parameters=YARN),
    "dflash-speculators": lambda name: speculators_block(name, "dflash"),
    "dspark-speculators": lambda name: speculators_block(name, "dspark"),
}


def main() -> None:
    names = sys.argv[1:] or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        sys.exit(f"unknown cases {', '.join(unknown)}; known: {', '.join(CASES)}")
    for name in names:
        torch.manual_seed(0)
        with torch.no_grad():
            CASES[name](name)
        print(name)
    versions = {
        package: version(package) for package in ("torch", "transformers", "speculators", "specforge", "dflash")
    }
    versions["python"] = platform.python_version()
    (HERE / "versions.json").write_text(json.dumps(versions, indent=2) + "\n")


if __name__ == "__main__":
    main()
