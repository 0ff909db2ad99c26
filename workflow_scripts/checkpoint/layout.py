"""Tensor names and shapes of the text decoder, and how every published layout maps to them.

Canonical names are the Hugging Face names without prefix: `layers.3.self_attn.q_proj.weight`.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from workflow_scripts.checkpoint.needed import shorten
from workflow_scripts.checkpoint.safetensors import TensorInfo
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError

EMBEDDING = "embed_tokens.weight"
PER_LAYER_EMBEDDING = "embed_tokens_per_layer.weight"

_WRAPPER_PREFIX = "model.language_model."
_TEXT_PREFIX = "model."
_HEAD = "lm_head.weight"
# Submodules of HF's Gemma4Model beside the text decoder.
_OTHER_MODALITIES = ("model.vision_tower.", "model.audio_tower.", "model.embed_vision.", "model.embed_audio.")
_STORED = ("BF16", "F16", "F32")
# Published base checkpoints carry these on KV-shared layers, where nothing reads them; HF's Gemma4TextModel drops them
# (`_keys_to_ignore_on_load_unexpected`).
_DEAD = re.compile(r"layers\.(\d+)\.self_attn\.(k_proj|v_proj|k_norm|v_norm)\.weight")


@dataclass(frozen=True)
class TextTensors:
    """The decoder's tensors by canonical name, and the redundant head where the checkpoint stores one."""

    tensors: dict[str, TensorInfo]
    head: TensorInfo | None


def expected_tensors(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that the decoder reads (E2B: 540)."""
    hidden, per_layer = config.hidden_size, config.hidden_size_per_layer_input
    packed = config.num_hidden_layers * per_layer
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        PER_LAYER_EMBEDDING: (config.vocab_size_per_layer_input, packed),
        "per_layer_model_projection.weight": (packed, hidden),
        "per_layer_projection_norm.weight": (per_layer,),
        "norm.weight": (hidden,),
    }
    for layer in range(config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _layer_shapes(config, layer).items()}
    return shapes


def published_tensors(config: TextConfig) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of a whole text decoder, with the dead K/V tensors of its KV-shared layers (E2B: 600)."""
    shapes = expected_tensors(config)
    for layer in range(config.first_shared_layer, config.num_hidden_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in _kv_shapes(config, layer).items()}
    return {_WRAPPER_PREFIX + name: shape for name, shape in shapes.items()}


def select_text_tensors(tensors: dict[str, TensorInfo], config: TextConfig, folder: Path) -> TextTensors:
    """Pick the decoder's tensors out of everything published and bring them to canonical names and shapes.

    Dropped: other modalities, and the dead K/V tensors of KV-shared layers. Raises UserError naming every tensor (up to
    ten of a kind) that is missing, unknown, of the wrong shape or of an unsupported dtype.
    """
    prefix = _prefix(tensors, folder)
    found: dict[str, TensorInfo] = {}
    unknown: list[str] = []
    for name, info in tensors.items():
        if name == _HEAD or name.startswith(_OTHER_MODALITIES):
            continue
        if not name.startswith(prefix):
            unknown.append(name)
        elif not _is_dead(canonical := name.removeprefix(prefix), config):
            found[canonical] = _packed(info, config) if canonical == PER_LAYER_EMBEDDING else info
    expected = expected_tensors(config)
    unknown += [prefix + name for name in found.keys() - expected.keys()]
    _refuse_misfits(found, expected, unknown, folder)
    return TextTensors({name: found[name] for name in sorted(expected)}, tensors.get(_HEAD))


def _layer_shapes(config: TextConfig, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, per_layer = config.hidden_size, config.hidden_size_per_layer_input
    head_dim, width = config.layer_head_dim(layer), config.layer_intermediate_size(layer)
    queries = config.num_attention_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "layer_scalar": (1,),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "pre_feedforward_layernorm.weight": (hidden,),
        "post_feedforward_layernorm.weight": (hidden,),
        "post_per_layer_input_norm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
        "per_layer_input_gate.weight": (per_layer, hidden),
        "per_layer_projection.weight": (hidden, per_layer),
    }
    return shapes if config.is_shared(layer) else shapes | _kv_shapes(config, layer)


def _kv_shapes(config: TextConfig, layer: int) -> dict[str, tuple[int, ...]]:
    """What makes the K/V of a layer; values have a norm, but it has no weight."""
    head_dim = config.layer_head_dim(layer)
    keys = config.num_key_value_heads * head_dim
    return {
        "self_attn.k_proj.weight": (keys, config.hidden_size),
        "self_attn.v_proj.weight": (keys, config.hidden_size),
        "self_attn.k_norm.weight": (head_dim,),
    }


def _prefix(tensors: dict[str, TensorInfo], folder: Path) -> str:
    for prefix in (_WRAPPER_PREFIX, _TEXT_PREFIX):
        if any(name.startswith(prefix + "layers.") for name in tensors):
            return prefix
    raise UserError(
        f"{folder} holds no tensor named {_WRAPPER_PREFIX}layers.* or {_TEXT_PREFIX}layers.*, the layouts of "
        f"Gemma4ForConditionalGeneration and Gemma4ForCausalLM; it holds {shorten(sorted(tensors))}"
    )


def _is_dead(name: str, config: TextConfig) -> bool:
    match = _DEAD.fullmatch(name)
    return match is not None and config.first_shared_layer <= int(match[1]) < config.num_hidden_layers


def _packed(info: TensorInfo, config: TextConfig) -> TensorInfo:
    """The per-layer embedding table as [V, L*d]; some checkpoints store the same bytes as [V, L, d]."""
    rows, layers = config.vocab_size_per_layer_input, config.num_hidden_layers
    size = config.hidden_size_per_layer_input
    return replace(info, shape=(rows, layers * size)) if info.shape == (rows, layers, size) else info


def _refuse_misfits(
    found: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]], unknown: list[str], folder: Path
) -> None:
    problems: list[str] = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"{len(missing)} tensors are missing: {shorten(missing)}")
    if unknown:
        problems.append(f"{len(unknown)} tensors are unknown: {shorten(sorted(unknown))}")
    present = sorted(expected.keys() & found.keys())
    if wrong := [name for name in present if found[name].shape != expected[name]]:
        listing = [f"{name} {list(found[name].shape)} instead of {list(expected[name])}" for name in wrong]
        problems.append(f"{len(wrong)} tensors have a wrong shape: {shorten(listing)}")
        problems += [
            _row_advice(name, found, expected) for name in (EMBEDDING, PER_LAYER_EMBEDDING) if name in wrong
        ]
    if odd := [f"{name} {found[name].dtype}" for name in present if found[name].dtype not in _STORED]:
        problems.append(
            f"{len(odd)} tensors are stored in a dtype other than {', '.join(_STORED)}: {shorten(odd)}"
        )
    if problems:
        raise UserError(f"{folder} does not fit its config.json: {'; '.join(filter(None, problems))}")


def _row_advice(name: str, found: dict[str, TensorInfo], expected: dict[str, tuple[int, ...]]) -> str:
    """Padded or cut vocabularies are common enough for a hint of their own. Ids above vocab_size are never guessed."""
    rows, vocab_size = found[name].shape[0] if found[name].shape else 0, expected[name][0]
    if rows == vocab_size:
        return ""
    remedy = (
        f"set vocab_size to {rows} if the extra rows are tokens, else cut them off"
        if rows > vocab_size
        else "the table lacks tokens, fetch the checkpoint again"
    )
    return f"{name} has {rows} rows but vocab_size is {vocab_size}: {remedy}"
