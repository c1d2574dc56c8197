"""What a run is: frozen, strict configuration, read from YAML, from dotted overrides and from vLLM's JSON.

Nothing here imports JAX. Whatever cannot be honoured is refused before anything is loaded, and all faults of a file
are listed at once, each with its line and, for an unknown key, with the nearest known one.
"""

from specjax.config.drafters import (
    DRAFTER_KINDS,
    AnyDrafter,
    AutoConfig,
    ConfigError,
    DFlashConfig,
    DrafterConfig,
    DraftModelConfig,
    DSparkConfig,
    Eagle3Config,
    HybridConfig,
    LearnedConfig,
    MTPConfig,
    NgramConfig,
    NoDrafter,
    PEagleConfig,
    SuffixConfig,
    UBTreeConfig,
    without_probe,
)
from specjax.config.run import RunConfig, drafter, load, make
from specjax.config.speculative import from_speculative_config

__all__ = [
    "DRAFTER_KINDS",
    "AnyDrafter",
    "AutoConfig",
    "ConfigError",
    "DFlashConfig",
    "DSparkConfig",
    "DraftModelConfig",
    "DrafterConfig",
    "Eagle3Config",
    "HybridConfig",
    "LearnedConfig",
    "MTPConfig",
    "NgramConfig",
    "NoDrafter",
    "PEagleConfig",
    "RunConfig",
    "SuffixConfig",
    "UBTreeConfig",
    "drafter",
    "from_speculative_config",
    "load",
    "make",
    "without_probe",
]
