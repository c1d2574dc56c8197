"""Which packaging a folder holds, from its files alone.

The order: speculators' keys, exact architecture names, `dflash_config.projector_type`, tensor names, and last
an MTP module inside a target's checkpoint. What is known and not supported is refused by its name.
"""

from specjax.drafters.formats import mtp
from specjax.drafters.formats.files import DrafterError, Folder

# A family of speculators, and the format that it is read as.
_SPECULATORS = {f: f"speculators-{f}" for f in ("eagle3", "peagle", "mtp", "dflash", "dflash2", "dspark")}
_SPECULATORS |= {"p_eagle": "speculators-peagle", "p-eagle": "speculators-peagle"}

_ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3-specforge",
    "Eagle3LlamaForCausalLM": "eagle3-specforge",
    "Qwen3Eagle3Model": "eagle3-deepspec",
    "PEagleDraftModel": "peagle-specforge",
    "DFlash2DraftModel": "dflash2-zlab",
    "Qwen3DSparkModel": "dspark-deepspec",
    "DSparkDraftModel": "dspark-specforge",
    "Lfm2DSparkDraftModel": "dspark-liquid",
    "UBTreeDraftModel": "ubtree",
}
_REFUSED = {
    "Gemma4Eagle3Model": "a DeepSpec head with Gemma 4 layers",
    "Gemma4DSparkModel": "a DSpark drafter with Gemma 4 layers",
    "MuseGlimmerAssistantForCausalLM": "a Muse-Glimmer assistant",
    "Gemma4AssistantForCausalLM": "a Gemma 4 assistant",
    "MedusaModel": "Medusa heads",
    "MedusaForCausalLM": "Medusa heads",
    "HydraModel": "Hydra heads",
    "EagleLlamaForCausalLM": "an EAGLE-1 head",
    "EagleModel": "an EAGLE-1 head",
}
_KNOWN = "EAGLE-3, P-EAGLE, MTP, DFlash, DFlash 2, DSpark and UBTree"


def detect(folder: Folder) -> str | None:
    """The name of the folder's format, or None for a model that is no drafter.

    Raises:
        DrafterError: a kind of drafter that is known and not supported, or an unknown one.
    """
    config, names = folder.config, folder.shapes

    def refuse(what: str) -> DrafterError:
        return DrafterError(str(folder.path), [f"it is {what}, which is not supported; supported are {_KNOWN}"])

    about = config.get("speculators_config")
    family = config.get("speculators_model_type") or (about or {}).get("algorithm")
    if family or about is not None:
        if family not in _SPECULATORS:
            raise refuse(f"a speculators checkpoint of type {family!r}")
        return _SPECULATORS[family]

    architectures = config.get("architectures") or []
    projector = (config.get("dflash_config") or {}).get("projector_type")
    for name in architectures:
        if name in _REFUSED:
            raise refuse(f"{_REFUSED[name]} ({name})")
        if name in _ARCHITECTURES:
            return _ARCHITECTURES[name]
        if name == "DFlashDraftModel" and projector in (None, "dflash"):
            return "dflash-zlab"
    if projector is not None:
        if projector not in ("dflash", "dspark"):
            raise refuse(f"a DFlash drafter with projector {projector!r}")
        return "dflash-zlab" if projector == "dflash" else "dspark-specforge"
    if config.get("medusa_num_heads") or any(name.startswith("medusa_head") for name in names):
        raise refuse("a set of Medusa heads")
    if config.get("hydra_num_heads"):
        raise refuse("a set of Hydra heads")
    if config.get("model_type") in ("eagle", "muse_glimmer_assistant", "gemma4_assistant"):
        raise refuse(f"a drafter of model_type {config['model_type']!r}")
    return _sniff(folder, refuse)


def _sniff(folder: Folder, refuse) -> str | None:
    """By tensor names, where no architecture says more than `LlamaForCausalLM`."""
    names = {name.removeprefix("model.") for name in folder.shapes}
    shapes = {name.removeprefix("model."): shape for name, shape in folder.shapes.items()}

    def any_in(text: str) -> bool:
        return any(name.startswith(text) for name in names)

    if "mask_hidden" in names:
        return "peagle-specforge"
    if any_in("midlayer."):
        return "eagle3-safeailab" if "eagle_config" not in folder.config else "eagle3-specforge"
    if "fc.weight" in names and ("d2t" in names or "layers.0.hidden_norm.weight" in names):
        return "eagle3-specforge"
    if any_in("candidate_selector."):
        return "dflash2-zlab"
    if any_in("bigram_selector."):
        return "ubtree"
    if any_in("markov_head.") or any_in("logit_head.markov_head."):
        return "dspark-specforge" if "dflash_config" in folder.config else "dspark-deepspec"
    if "fc.weight" in names and "hidden_norm.weight" in names:
        return "dflash-zlab"
    if (
        "fc.weight" in names
        and shapes["fc.weight"][1:] == (2 * shapes["fc.weight"][0],)
        and "embed_tokens.weight" in names
    ):
        raise refuse("an EAGLE-1 head (its fc reads one hidden state)")
    if not folder.shapes and folder.pickles and "draft_vocab_size" in folder.config:
        return "eagle3-safeailab"  # so that the reader can say what to do about the pickle
    if format := mtp.found(folder):
        return format
    if any(name.startswith(("mtp.", "model.mtp.")) for name in folder.shapes):
        raise refuse("a checkpoint with an MTP module of a family that is not known")
    return None
