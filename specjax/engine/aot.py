"""Whole rounds and passes for absent TPUs and GPUs, with abstract weights: what to compile."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from specjax.config import RunConfig
from specjax.costmodel.shapes import ModelShape
from specjax.drafters import registry
from specjax.engine import step
from specjax.engine.engine import Engine
from specjax.engine.step import Stage, Width
from specjax.pallas_kernels import aot_gpu
from specjax.pallas_kernels.aot import Chip, Job
from specjax.pallas_kernels.tree_attention.tpu_request import Shape
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


@dataclasses.dataclass(frozen=True)
class Case:
    """A round of a decoder, as it is compiled.

    Attributes:
        name: of the model.
        model: its description.
        drafter: `none`, or a drafter without weights.
        drafts: of a round, a chain.
        batch: requests.
        context: token slots of a request.
        dtype: of weights, activations and cache.
        fused: all layers as one kernel.
    """

    name: str
    model: DecoderConfig
    drafter: str = "ngram"
    drafts: int = 7
    batch: int = 1
    context: int = 2048
    dtype: str = "bfloat16"
    fused: bool = False

    def abstract(self, model: DecoderConfig | None = None) -> tuple[Any, Any, Stage, Width]:
        """Shapes of the target's weights and of an engine's state, and the static halves of its widest round."""
        model = model or self.model
        target, params = decoder.abstract(model, jnp.dtype(self.dtype))
        if self.fused:
            params = jax.eval_shape(lambda p: fused.fuse(target, p)[1], params)
            target = fused.FusedTarget(model, fused.plan_of(model, self.dtype))
        drafts = {"kind": self.drafter} | ({"num_speculative_tokens": self.drafts} if self.drafts else {})
        config = RunConfig(
            context=self.context,
            batch=self.batch,
            dtype=self.dtype,
            warmup=False,
            compilation_cache=None,
            drafter=drafts,
        )
        drafter = None
        if self.drafter != "none":
            drafter = registry.create(self.drafter, config.drafter.model_dump(exclude={"kind"}))
        state, stage, width = abstract_engine(target, params, drafter, config)
        return {"target": params, "drafter": ()}, state, stage, width


def cases(chip: Chip | aot_gpu.Chip) -> list[Case]:
    """Rounds with n-gram drafts of the models that fit the chip's memory, layer by layer and fused."""
    names = ("Llama-3.1-8B", "Qwen3-8B") if chip.memory > 20e9 else ("Llama-3.2-3B",)
    return [Case(name, MODELS[name], fused=one) for name in names for one in (False, True)]


def job(case: Case) -> Job:
    """One whole round at the widest verify size, its weights abstract."""
    params, state, stage, width = case.abstract()
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params["target"]))
    if not case.model.tie_word_embeddings:
        table = params["target"]["embedding"]
        weights -= table.size * table.dtype.itemsize  # of which a round reads a few rows
    return Job(
        name=f"round {case.name}, {width.count} rows, {'fused' if case.fused else 'layer by layer'}",
        function=functools.partial(step.round_step, stage, width),
        args=(params, state),
        needed=weights,
        donated=(1,),
    )


def pass_job(case: Case) -> tuple[Job, int]:
    """The target's pass of a round on a TPU, and the bytes in it that the attention kernels state as their cost."""
    params, state, stage, width = case.abstract()

    def run(params: Any, state: Any) -> tuple[Any, Any]:
        _, out, logits = step.verify(stage, width, params, state)
        return out.cache, logits

    c, dtype = case.model, jnp.dtype(case.dtype)
    q, tile = (
        jax.ShapeDtypeStruct((case.batch, width.width, heads, c.head_dim), dtype)
        for heads in (c.num_heads, c.num_kv_heads)
    )
    pages = state.cache.k
    stated = sum(
        Shape.of(q, tile, pages[i], None, c.windows[i], None, None).cost.bytes_accessed for i in range(len(pages))
    )
    name = f"pass {case.name}, {c.num_layers} layers, {case.batch} x {case.drafts + 1} rows"
    return Job(name=name, function=run, args=(params, state), donated=(1,)), stated


def cut(model: DecoderConfig, layers: int) -> DecoderConfig:
    """The first layers of a decoder."""
    return dataclasses.replace(model, num_layers=layers, windows=model.windows[:1] * layers)


def model_of(shape: ModelShape) -> DecoderConfig:
    """The decoder of a known shape: its own description where that is above, else one of the same sizes."""
    for name, model in MODELS.items():
        if name.lower() == shape.name:
            return model
    qwen = shape.name.startswith("qwen3")
    return DecoderConfig(
        family="qwen3" if qwen else "llama",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=1e-6 if qwen else 1e-5,
        rope=RopeConfig(theta=1e6 if qwen else 1e5),
        max_position_embeddings=131072,
        tie_word_embeddings=shape.tied,
        qk_norm=qwen,
    )


def abstract_engine(target: Any, params: Any, drafter: Any, config: RunConfig) -> tuple[Any, Stage, Width]:
    """Shapes of an engine's state, and the static halves of its widest round; nothing is allocated."""
    made = {}

    def initial():
        engine = Engine(target, params, drafter=drafter, config=config)
        made["programs"] = engine.programs
        return engine._state

    state = jax.eval_shape(initial)
    return state, made["programs"].stage, made["programs"].widths[-1]
