"""Whole rounds for absent TPUs: the target's pass, accept, commit and the next draft, with abstract weights."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import RunConfig
from specjax.drafters import registry
from specjax.engine import step
from specjax.engine.engine import Engine
from specjax.pallas_kernels.aot import Chip, Job
from specjax.targets import decoder, fused
from specjax.targets.config import DecoderConfig
from specjax.targets.rope import RopeConfig

_LLAMA_ROPE = RopeConfig(
    kind="llama3",
    theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
MODELS = {
    "Llama-3.1-8B": DecoderConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=_LLAMA_ROPE,
        max_position_embeddings=131072,
    ),
    "Qwen3-8B": DecoderConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=40960,
        qk_norm=True,
    ),
    "Llama-3.2-3B": DecoderConfig(
        family="llama",
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-5,
        rope=_LLAMA_ROPE,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    ),
}


def jobs(chip: Chip) -> list[Job]:
    """Rounds with n-gram drafts for the models that fit the chip's memory, layer by layer and fused."""
    names = ("Llama-3.1-8B", "Qwen3-8B") if chip.memory > 20e9 else ("Llama-3.2-3B",)
    return [job(name, one) for name in names for one in (False, True)]


def job(name: str, one: bool, context: int = 2048) -> Job:
    """One round of a model in bfloat16 at the widest verify size; `one`: its layers as one kernel."""
    target, params = decoder.abstract(MODELS[name], jnp.bfloat16)
    if one:
        params = jax.eval_shape(lambda p: fused.fuse(target, p)[1], params)
        target = fused.FusedTarget(MODELS[name], fused.plan_of(MODELS[name], jnp.bfloat16))
    drafts = {"kind": "ngram", "num_speculative_tokens": 7}
    config = RunConfig(context=context, dtype="bfloat16", warmup=False, compilation_cache=None, drafter=drafts)
    drafter = registry.create("ngram", config.drafter.model_dump(exclude={"kind"}))
    state, stage, width = abstract_engine(target, params, drafter, config)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    if not MODELS[name].tie_word_embeddings:
        weights -= params["embedding"].size * 2  # of which a round reads a few rows
    return Job(
        name=f"round {name}, {width.count} rows, {'fused' if one else 'layer by layer'}",
        function=functools.partial(step.round_step, stage, width),
        args=({"target": params, "drafter": ()}, state),
        needed=weights,
        donated=(1,),
    )


def abstract_engine(target: Any, params: Any, drafter: Any, config: RunConfig) -> tuple[Any, Any, Any]:
    """Shapes of an engine's state, and the static halves of its widest round; nothing is allocated."""
    made = {}

    def initial():
        engine = Engine(target, params, drafter=drafter, config=config)
        made["programs"] = engine.programs
        return engine._state

    state = jax.eval_shape(initial)
    return state, made["programs"].stage, made["programs"].widths[-1]
