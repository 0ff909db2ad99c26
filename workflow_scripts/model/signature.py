"""The I/O contract of every graph form: function -> inputs and outputs with dtype and shape.

Export traces with it, gates compare a finished bundle with it, hosts allocate by it. Pure data: no torch here.
Names and shapes are those of the published bundles, which apps load by name.
"""

from dataclasses import dataclass

from workflow_scripts.checkpoint.text_config import FULL, SLIDING, TextConfig
from workflow_scripts.errors import UserError


@dataclass(frozen=True)
class TensorSpec:
    """Element type (numpy's name) and static shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class FunctionSpec:
    """Inputs and outputs of one function, in order."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]


COMPUTE_DTYPES = {"fp32": "float32", "fp16": "float16"}
_TOKEN = TensorSpec("int32", (1, 1))


def hostcache_core(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """One position; `context` past columns in the caches, the current one is column `context` of the masks.

    Raises UserError for a context beyond what the model was made for.
    """
    if context > config.max_position_embeddings:
        raise UserError(
            f"context is {context} in the workflow's config, but the checkpoint's max_position_embeddings is "
            f"{config.max_position_embeddings}: choose at most that"
        )
    dtype = COMPUTE_DTYPES[compute]
    hidden = TensorSpec(dtype, (1, 1, config.hidden_size))
    mask = TensorSpec(dtype, (1, 1, 1, context + 1))

    def cache(kind: str, length: int) -> TensorSpec:
        slots = config.slots(kind)
        head_dim = config.layer_head_dim(slots[0])
        return TensorSpec(dtype, (len(slots), 1, config.num_key_value_heads, length, head_dim))

    inputs = {
        "inputs_embeds": hidden,
        "per_layer_inputs": TensorSpec(
            dtype, (1, 1, config.num_hidden_layers, config.hidden_size_per_layer_input)
        ),
        "position_ids": _TOKEN,
        "causal_mask_full": mask,
        "causal_mask_sliding": mask,
        "sliding_k": cache(SLIDING, context),
        "sliding_v": cache(SLIDING, context),
        "full_k": cache(FULL, context),
        "full_v": cache(FULL, context),
    }
    outputs = {
        "hidden": hidden,
        "sliding_k_cur": cache(SLIDING, 1),
        "sliding_v_cur": cache(SLIDING, 1),
        "full_k_cur": cache(FULL, 1),
        "full_v_cur": cache(FULL, 1),
    }
    return {"main": FunctionSpec(inputs, outputs)}


def head(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """Logits with softcap; float32 on both sides in every precision."""
    hidden = TensorSpec("float32", (1, 1, config.hidden_size))
    return {
        "main": FunctionSpec({"hidden": hidden}, {"logits": TensorSpec("float32", (1, 1, config.vocab_size))})
    }


def head_argmax(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """The next token id."""
    hidden = TensorSpec("float32", (1, 1, config.hidden_size))
    return {"main": FunctionSpec({"hidden": hidden}, {"token_id": _TOKEN})}


def hostcache_metal(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """The MLPs run in Metal kernels; a host sees no difference to `hostcache_core`."""
    return hostcache_core(config, context, compute)


def head_argmax_metal(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """Per tile of 8 token ids, the largest score and its id; the host takes the id of the largest of them.

    The hidden state is in the compute type, as a core gives it; a vocabulary of 262144 has 32768 tiles.
    """
    hidden = TensorSpec(COMPUTE_DTYPES[compute], (1, 1, config.hidden_size))
    tiles = (config.vocab_size // 8,)
    outputs = {"partial_values": TensorSpec("float32", tiles), "partial_indices": TensorSpec("int32", tiles)}
    return {"main": FunctionSpec({"hidden": hidden}, outputs)}


def frontend(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """Two functions: token id -> embedding; token id and embedding -> per-layer inputs."""
    core = hostcache_core(config, context, compute)["main"].inputs
    embeds, per_layer = core["inputs_embeds"], core["per_layer_inputs"]
    return {
        "gather_embeds": FunctionSpec({"input_ids": _TOKEN}, {"inputs_embeds": embeds}),
        "gather_per_layer": FunctionSpec(
            {"input_ids": _TOKEN, "inputs_embeds": embeds}, {"per_layer_inputs": per_layer}
        ),
    }


_FORMS = {
    "hostcache_core": hostcache_core,
    "hostcache_metal": hostcache_metal,
    "head": head,
    "head_argmax": head_argmax,
    "head_argmax_metal": head_argmax_metal,
    "frontend": frontend,
}


def signature(form: str, config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """Signature of a graph form. Raises UserError for a form that does not exist."""
    if form not in _FORMS:
        raise UserError(f"there is no graph form `{form}`: it is one of {', '.join(_FORMS)}")
    return _FORMS[form](config, context, compute)
