"""Read a checkpoint's config.json into the canonical configuration, whatever way it spells it.

Nothing is guessed. The defaults of the Hugging Face class are not the values of any released model (hidden_size 2304,
final_logit_softcapping None, ...), so a field that config.json does not state is refused by name.
"""

import math
from collections.abc import Mapping
from typing import Any

from workflow_scripts.checkpoint.text_config import FULL, SLIDING, RopeSpec, TextConfig
from workflow_scripts.errors import UserError

_ADVICE = "use the config.json that was published with these weights"
# Weights are coded in groups of 32 rows (palettes) and in blocks of 32 values along a row (int4).
_GROUP = 32
# The pipelined engine of the Core AI runtime aborts on other vocabulary sizes.
_VOCAB_MULTIPLE = 64

_COUNTS = (
    "vocab_size",
    "vocab_size_per_layer_input",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size_per_layer_input",
    "sliding_window",
    "max_position_embeddings",
)
_REQUIRED = (
    *_COUNTS,
    "num_kv_shared_layers",
    "use_double_wide_mlp",
    "final_logit_softcapping",
    "rms_norm_eps",
    "layer_types",
    "hidden_activation",
    "bos_token_id",
    "pad_token_id",
)
# Features of other Gemma 4 variants (or of other models) that change the mathematics of the decoder.
_UNSUPPORTED = {
    "attention_k_eq_v": "values that reuse the key projection",
    "enable_moe_block": "mixture-of-experts layers",
    "num_experts": "mixture-of-experts layers",
    "attention_bias": "biases in the attention projections",
    "use_bidirectional_attention": "bidirectional attention",
    "attn_logit_softcapping": "a soft cap on attention scores",
    "quantization_config": "weights that are already quantized in storage",
}


def parse_text_config(raw_config: Mapping[str, Any], where: str) -> TextConfig:
    """The canonical configuration out of a Hugging Face config.json, in any spelling that leaves nothing to guess.

    `where` names the file in messages. Raises UserError naming the key that is missing, wrong or not supported.
    """
    text, path = _text_section(raw_config, where)
    reader = _Reader(text, path)
    reader.require(_REQUIRED)
    _refuse_unsupported(raw_config, f"{where}: ")
    _refuse_unsupported(text, path)
    if text["hidden_activation"] != "gelu_pytorch_tanh":
        raise UserError(
            f"{path}hidden_activation is `{text['hidden_activation']}`: only gelu_pytorch_tanh is supported"
        )
    layer_types = reader.layer_types()
    config = TextConfig(
        **{name: reader.integer(name, minimum=1) for name in _COUNTS},
        global_head_dim=_global_head_dim(reader, layer_types),
        num_kv_shared_layers=reader.integer("num_kv_shared_layers", minimum=0),
        use_double_wide_mlp=reader.boolean("use_double_wide_mlp"),
        final_logit_softcapping=reader.positive("final_logit_softcapping"),
        rms_norm_eps=reader.positive("rms_norm_eps"),
        layer_types=layer_types,
        rope=_rope(reader, set(layer_types)),
        tie_word_embeddings=_tied(raw_config, text, where),
        bos_token_id=reader.integer("bos_token_id", minimum=0),
        pad_token_id=reader.integer("pad_token_id", minimum=0),
        eos_token_ids=_eos_token_ids(raw_config, text, where),
    )
    _check_consistent(config, path)
    _check_supported_sizes(config, path)
    return config


def _text_section(raw: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], str]:
    """The text decoder's keys and the prefix by which messages name them."""
    model_type = raw.get("model_type")
    if model_type == "gemma4_text":
        return raw, f"{where}: "
    if model_type != "gemma4":
        raise UserError(
            f"{where}: model_type is `{model_type}`; supported are gemma4 (with its text_config) and gemma4_text"
        )
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise UserError(f"{where}: text_config is missing; {_ADVICE}")
    if text.get("model_type", "gemma4_text") != "gemma4_text":
        raise UserError(
            f"{where}: text_config.model_type is `{text['model_type']}`; only gemma4_text is supported"
        )
    return text, f"{where}: text_config."


class _Reader:
    """Typed look-ups in one section of a config; messages carry the section's prefix."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values = values
        self.path = path

    def require(self, names: tuple[str, ...]) -> None:
        """Refuse absent and null keys, all at once."""
        if missing := [name for name in names if self.values.get(name) is None]:
            raise UserError(f"{self.path}{', '.join(missing)} is missing and must not be guessed; {_ADVICE}")

    def integer(self, name: str, minimum: int) -> int:
        """A whole number of at least `minimum`."""
        value = self.values[name]
        if type(value) is not int or value < minimum:
            raise UserError(
                f"{self.path}{name} is {value!r}: it must be a whole number of at least {minimum}"
            )
        return value

    def boolean(self, name: str) -> bool:
        """True or false, nothing that is merely truthy."""
        value = self.values[name]
        if type(value) is not bool:
            raise UserError(f"{self.path}{name} is {value!r}: it must be true or false")
        return value

    def positive(self, name: str) -> float:
        """A finite number above zero."""
        return _positive(self.values[name], f"{self.path}{name}")

    def section(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty where it is absent."""
        return _mapping(self.values.get(name), f"{self.path}{name}")

    def layer_types(self) -> tuple[str, ...]:
        """The attention type of each layer."""
        value, layers = self.values["layer_types"], self.integer("num_hidden_layers", minimum=1)
        if not isinstance(value, list) or any(kind not in (SLIDING, FULL) for kind in value):
            raise UserError(f"{self.path}layer_types must be a list of {SLIDING} and {FULL}, not {value!r}")
        if len(value) != layers:
            raise UserError(
                f"{self.path}layer_types has {len(value)} entries, but num_hidden_layers is {layers}"
            )
        if value[-1] != FULL:  # transformers overwrites it with a mere warning
            raise UserError(f"{self.path}layer_types ends in {value[-1]}: Gemma 4's last layer is {FULL}")
        return tuple(value)


def _mapping(value: Any, name: str) -> Mapping[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise UserError(f"{name} is {value!r}: it must be a JSON object")
    return value or {}


def _positive(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (0 < value < math.inf):
        raise UserError(f"{name} is {value!r}: it must be a finite number above 0")
    return float(value)


def _refuse_unsupported(values: Mapping[str, Any], path: str) -> None:
    for name, meaning in _UNSUPPORTED.items():
        if values.get(name):
            raise UserError(f"{path}{name} is set: {meaning}, which this decoder does not support")


def _agreed(candidates: Mapping[str, Any], path: str) -> Any:
    """The one value that all stated spellings give; None where none is stated."""
    stated = {name: value for name, value in candidates.items() if value is not None}
    values = list(stated.values())
    if any(value != values[0] for value in values):
        listing = ", ".join(f"{name} = {value!r}" for name, value in stated.items())
        raise UserError(f"{path}spellings of the same value disagree: {listing}; {_ADVICE}")
    return values[0] if values else None


def _global_head_dim(reader: _Reader, layer_types: tuple[str, ...]) -> int:
    """Head size of full-attention layers: `global_head_dim` (hub) or `per_layer_config` (transformers 5.24)."""
    value = _agreed(
        {
            "global_head_dim": reader.values.get("global_head_dim"),
            "per_layer_config": _per_layer_head_dim(reader, layer_types),
        },
        reader.path,
    )
    if value is None:  # transformers would silently take 512
        raise UserError(
            f"{reader.path}global_head_dim is missing, and so is per_layer_config; "
            f"the head size of {FULL} layers must not be guessed; {_ADVICE}"
        )
    if type(value) is not int or value < 1:
        raise UserError(f"{reader.path}global_head_dim is {value!r}: it must be a whole number of at least 1")
    return value


def _per_layer_head_dim(reader: _Reader, layer_types: tuple[str, ...]) -> int | None:
    if reader.values.get("per_layer_config") is None:
        return None
    table = reader.section("per_layer_config")
    path = f"{reader.path}per_layer_config"
    sizes = [reader.values["head_dim"]] * len(layer_types)
    for key, value in table.items():
        if not (key.isdecimal() and int(key) < len(layer_types)):
            raise UserError(f"{path} names layer `{key}`: there are only {len(layer_types)} layers")
        overrides = _mapping(value, f"{path}.{key}")
        if other := sorted(overrides.keys() - {"head_dim"}):
            raise UserError(
                f"{path}.{key}.{other[0]} is not supported: only head_dim may differ between layers"
            )
        sizes[int(key)] = overrides.get("head_dim", sizes[int(key)])
    full = {size for size, kind in zip(sizes, layer_types, strict=True) if kind == FULL}
    sliding = {size for size, kind in zip(sizes, layer_types, strict=True) if kind == SLIDING}
    if len(full) != 1 or sliding - {reader.values["head_dim"]}:
        raise UserError(f"{path} must give all {FULL} layers one head_dim and leave the others at head_dim")
    return full.pop()


def _rope(reader: _Reader, kinds: set[str]) -> dict[str, RopeSpec]:
    """RoPE per layer type, from the per-type dicts or the older flat keys; every stated spelling must agree.

    Flat spelling: `rope_theta` and `global_partial_rotary_factor` (which means the proportional type) for full layers,
    `rope_local_base_freq` for sliding ones, whose type is then `default`.
    """
    values, path = reader.values, reader.path
    table = reader.section("rope_parameters")
    if unknown := sorted(table.keys() - {SLIDING, FULL}):
        raise UserError(
            f"{path}rope_parameters.{unknown[0]} is not supported: it must hold one dict per layer type, "
            f"{SLIDING} and {FULL}"
        )
    if values.get("rope_scaling"):
        raise UserError(f"{path}rope_scaling is not supported: RoPE scaling is not part of Gemma 4")
    global_factor = values.get("global_partial_rotary_factor")
    local_theta = values.get("rope_local_base_freq")
    flat = {
        FULL: {
            "rope_theta": ("rope_theta", values.get("rope_theta")),
            "partial_rotary_factor": ("global_partial_rotary_factor", global_factor),
            "rope_type": ("global_partial_rotary_factor", None if global_factor is None else "proportional"),
        },
        SLIDING: {
            "rope_theta": ("rope_local_base_freq", local_theta),
            "rope_type": ("rope_local_base_freq", None if local_theta is None else "default"),
        },
    }
    return {
        kind: _rope_of(kind, _mapping(table.get(kind), f"{path}rope_parameters.{kind}"), flat[kind], path)
        for kind in sorted(kinds)
    }


def _rope_of(
    kind: str, nested: Mapping[str, Any], flat: Mapping[str, tuple[str, Any]], path: str
) -> RopeSpec:
    section = f"rope_parameters.{kind}"
    known = {"rope_theta", "rope_type", "partial_rotary_factor"}
    if unknown := sorted(name for name in nested.keys() - known if nested[name] is not None):
        raise UserError(f"{path}{section}.{unknown[0]} is not supported: Gemma 4 uses no RoPE scaling")

    def stated(name: str) -> Any:
        flat_name, flat_value = flat.get(name, (name, None))
        return _agreed({f"{section}.{name}": nested.get(name), flat_name: flat_value}, path)

    def required(name: str) -> Any:
        value = stated(name)
        if value is None:
            older = f" (or the older {flat[name][0]})" if name in flat else ""
            raise UserError(f"{path}{section}.{name}{older} is missing and must not be guessed; {_ADVICE}")
        return value

    rope_type = required("rope_type")
    theta = _positive(required("rope_theta"), f"{path}{section}.rope_theta")
    if rope_type == "default":
        if stated("partial_rotary_factor") not in (None, 1):
            raise UserError(
                f"{path}{section}.partial_rotary_factor needs rope_type proportional, not default"
            )
        return RopeSpec(theta, "default", 1.0)
    if rope_type != "proportional":
        raise UserError(f"{path}{section}.rope_type is `{rope_type}`: supported are default and proportional")
    share = _positive(required("partial_rotary_factor"), f"{path}{section}.partial_rotary_factor")
    if share > 1:
        raise UserError(
            f"{path}{section}.partial_rotary_factor is {share}: it is a share of the head, at most 1"
        )
    return RopeSpec(theta, "proportional", share)


def _tied(raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> bool:
    stated = [
        flag for flag in (text.get("tie_word_embeddings"), raw.get("tie_word_embeddings")) if flag is not None
    ]
    if not stated:
        raise UserError(f"{where}: tie_word_embeddings is missing and must not be guessed; {_ADVICE}")
    if any(flag is not True for flag in stated):
        raise UserError(
            f"{where}: tie_word_embeddings is not true; models whose lm_head differs from embed_tokens are not "
            "supported"
        )
    return True


def _eos_token_ids(raw: Mapping[str, Any], text: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The whole model's stop ids where it states them (`-it` releases: [1, 106]), else the decoder's own."""
    value = raw.get("eos_token_id")
    value = text.get("eos_token_id") if value is None else value
    ids = value if isinstance(value, list) else [value]
    if not ids or any(type(token) is not int or token < 0 for token in ids):
        raise UserError(f"{where}: eos_token_id is {value!r}: it must be a token id or a list of them")
    return tuple(ids)


def _check_consistent(config: TextConfig, path: str) -> None:
    """Refuse fields that contradict each other."""
    if config.num_attention_heads % config.num_key_value_heads:
        raise UserError(
            f"{path}num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}"
        )
    if config.num_kv_shared_layers >= config.num_hidden_layers:
        raise UserError(
            f"{path}num_kv_shared_layers {config.num_kv_shared_layers} leaves none of "
            f"{config.num_hidden_layers} layers to produce K/V"
        )
    for kind in sorted(set(config.layer_types)):
        if not config.slots(kind):
            raise UserError(
                f"{path}num_kv_shared_layers {config.num_kv_shared_layers} leaves no {kind} layer to produce K/V"
            )
    if config.vocab_size_per_layer_input != config.vocab_size:
        raise UserError(
            f"{path}vocab_size_per_layer_input {config.vocab_size_per_layer_input} differs from "
            f"vocab_size {config.vocab_size}: every token needs its row of per-layer embeddings"
        )
    tokens = (config.bos_token_id, config.pad_token_id, *config.eos_token_ids)
    if max(tokens) >= config.vocab_size:
        raise UserError(
            f"{path}bos, pad or eos token id {max(tokens)} is outside vocab_size {config.vocab_size}"
        )


def _check_supported_sizes(config: TextConfig, path: str) -> None:
    """Refuse sizes that a later stage or the runtime cannot handle."""
    if config.vocab_size % _VOCAB_MULTIPLE:
        raise UserError(
            f"{path}vocab_size is {config.vocab_size}, not a multiple of {_VOCAB_MULTIPLE}: the Core AI runtime's "
            "pipelined engine aborts on it; pad the vocabulary (config.json and both embedding tables) "
            f"to {math.ceil(config.vocab_size / _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE}"
        )
    for name in (
        "hidden_size",
        "intermediate_size",
        "head_dim",
        "global_head_dim",
        "hidden_size_per_layer_input",
    ):
        if getattr(config, name) % _GROUP:
            raise UserError(
                f"{path}{name} is {getattr(config, name)}, not a multiple of {_GROUP}: weights are quantized in "
                f"groups of {_GROUP} rows and blocks of {_GROUP} values"
            )
