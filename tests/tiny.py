"""Tiny random Gemma 4 checkpoints for tests: numpy only, no training, every layout that the world has.

`write_checkpoint(folder, ...)` writes a published folder; `build_tree(folder, tree)` runs stage `checkpoint` on one and
opens the result. The same arguments give the same bytes.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from workflow_scripts.checkpoint.config_json import parse_text_config
from workflow_scripts.checkpoint.layout import expected_tensors
from workflow_scripts.checkpoint.reader import Checkpoint
from workflow_scripts.checkpoint.safetensors import DTYPES, SafetensorsWriter
from workflow_scripts.checkpoint.text_config import FULL, SLIDING, TextConfig
from workflow_scripts.stages import checkpoint as stage
from workflow_scripts.stages.job import Job

Tensors = dict[str, np.ndarray]
WRAPPER_PREFIX = "model.language_model."
TEXT_PREFIX = "model."
DEAD_NAMES = ("self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.k_norm.weight")


@dataclass(frozen=True)
class Dims:
    """Sizes of the model; the layers are `pattern` repeated: (4 sliding + 1 full) twice, the second half shared."""

    vocab_size: int = 128
    hidden_size: int = 96  # its root is not exact in bf16, as for the real models
    intermediate_size: int = 64
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    head_dim: int = 32
    global_head_dim: int = 64
    hidden_size_per_layer_input: int = 32
    num_kv_shared_layers: int = 5
    use_double_wide_mlp: bool = True
    sliding_window: int = 8
    max_position_embeddings: int = 512
    layer_types: tuple[str, ...] = (*[SLIDING] * 4, FULL) * 2

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layer_types)


def text_config(dims: Dims = Dims(), spelling: str = "hub", rope: str = "nested") -> dict[str, Any]:
    """The text part of config.json.

    `spelling`: "hub" (global_head_dim) or "5.24" (per_layer_config). `rope`: "nested" (per layer type) or "flat".
    """
    full_layers = [layer for layer, kind in enumerate(dims.layer_types) if kind == FULL]
    head_sizes = {
        "hub": {"global_head_dim": dims.global_head_dim, "num_global_key_value_heads": None},
        "5.24": {
            "per_layer_config": {str(layer): {"head_dim": dims.global_head_dim} for layer in full_layers}
        },
    }
    ropes = {
        "nested": {
            "rope_parameters": {
                FULL: {"rope_theta": 1000000.0, "rope_type": "proportional", "partial_rotary_factor": 0.25},
                SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
            }
        },
        "flat": {
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "global_partial_rotary_factor": 0.25,
        },
    }
    return {
        "model_type": "gemma4_text",
        "vocab_size": dims.vocab_size,
        "vocab_size_per_layer_input": dims.vocab_size,
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_hidden_layers,
        "num_attention_heads": dims.num_attention_heads,
        "num_key_value_heads": dims.num_key_value_heads,
        "head_dim": dims.head_dim,
        "hidden_size_per_layer_input": dims.hidden_size_per_layer_input,
        "num_kv_shared_layers": dims.num_kv_shared_layers,
        "use_double_wide_mlp": dims.use_double_wide_mlp,
        "sliding_window": dims.sliding_window,
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": dims.max_position_embeddings,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attention_k_eq_v": False,
        "enable_moe_block": False,
        "use_bidirectional_attention": None,
        "layer_types": list(dims.layer_types),
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "pad_token_id": 0,
        "eos_token_id": [1, 106],
        **head_sizes[spelling],
        **ropes[rope],
    }


def raw_config(dims: Dims = Dims(), wrapper: bool = True, **spellings: str) -> dict[str, Any]:
    """A whole config.json: the multimodal wrapper's, or the text-only model's."""
    text = text_config(dims, **spellings)
    if not wrapper:
        return {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16", **text}
    return {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
        "text_config": {**text, "eos_token_id": 1},
        "vision_config": None,
        "audio_config": None,
    }


def canonical_config(dims: Dims = Dims()) -> TextConfig:
    """The parsed configuration, without any files."""
    return parse_text_config(raw_config(dims), "config.json")


def random_tensors(dims: Dims = Dims(), seed: int = 0, dtype: str = "BF16") -> Tensors:
    """Seeded weights by canonical name; no norm weight and no layer_scalar sits at an identity value."""
    generator = np.random.default_rng(seed)
    return {
        name: _random(generator, name, shape, dims).astype(DTYPES[dtype])
        for name, shape in expected_tensors(canonical_config(dims)).items()
    }


def dead_tensors(dims: Dims = Dims(), seed: int = 1, dtype: str = "BF16") -> Tensors:
    """The K/V tensors that unpruned releases carry on KV-shared layers."""
    config, generator = canonical_config(dims), np.random.default_rng(seed)
    shapes = expected_tensors(config)
    return {
        f"layers.{layer}.{name}": generator.standard_normal(
            shapes[f"layers.{config.producer(layer)}.{name}"]
        ).astype(DTYPES[dtype])
        for layer in range(config.first_shared_layer, config.num_hidden_layers)
        for name in DEAD_NAMES
    }


def other_modalities(seed: int = 2) -> Tensors:
    """Published names of vision and audio tensors; one holds what a text tensor must not."""
    values = np.random.default_rng(seed).standard_normal((4, 32)).astype(ml_dtypes.bfloat16)
    return {
        "model.vision_tower.patch_embedder.input_proj.weight": values,
        "model.audio_tower.layers.0.self_attn.q_proj.linear.weight": values + 1,
        "model.audio_tower.layers.0.self_attn.q_proj.input_max": np.full((), np.inf, ml_dtypes.bfloat16),
        "model.embed_vision.embedding_projection.weight": values + 2,
        "model.embed_audio.embedding_projection.weight": values + 3,
    }


def write_checkpoint(
    folder: Path,
    dims: Dims = Dims(),
    *,
    wrapper: bool = True,
    spelling: str = "hub",
    rope: str = "nested",
    unpruned: bool = False,
    modalities: bool = False,
    shards: int = 0,
    dtype: str = "BF16",
    seed: int = 0,
    edit_config: Callable[[dict[str, Any]], None] | None = None,
    edit_tensors: Callable[[Tensors], None] | None = None,
) -> Path:
    """Write a published folder and return it.

    `wrapper` chooses config and tensor prefix; `shards` > 0 writes that many files with an index; `edit_config` and
    `edit_tensors` may change config.json and the published tensors (full names) before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = raw_config(dims, wrapper=wrapper, spelling=spelling, rope=rope)
    weights = random_tensors(dims, seed, dtype) | (dead_tensors(dims, dtype=dtype) if unpruned else {})
    prefix = WRAPPER_PREFIX if wrapper else TEXT_PREFIX
    tensors = {prefix + name: value for name, value in weights.items()}
    tensors |= other_modalities() if modalities else {}
    if edit_config:
        edit_config(config)
    if edit_tensors:
        edit_tensors(tensors)
    write_text(folder / "config.json", config)
    write_text(folder / "generation_config.json", {"eos_token_id": [1, 106]})
    write_tokenizer(folder, dims.vocab_size)
    if shards:
        write_shards(folder, tensors, shards)
    else:
        write_tensors(folder / "model.safetensors", tensors)
    return folder


def write_text(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file, as transformers writes it (metadata format "pt")."""
    codes = {dtype: code for code, dtype in DTYPES.items()}
    layout = {name: (codes[array.dtype], array.shape) for name, array in tensors.items()}
    with SafetensorsWriter(path, layout, metadata={"format": "pt"}) as writer:
        for name, array in tensors.items():
            writer.write(name, array)


def write_shards(folder: Path, tensors: Mapping[str, np.ndarray], count: int) -> None:
    """`count` files and their index; neighbouring tensors go to different shards."""
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    weight_map = {name: names[position % count] for position, name in enumerate(tensors)}
    for shard in names:
        write_tensors(
            folder / shard, {name: tensors[name] for name, home in weight_map.items() if home == shard}
        )
    total = sum(array.nbytes for array in tensors.values())
    write_text(
        folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
    )


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer.json whose every id is a word of its own: `t7` is id 7."""
    special = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 105: "<|turn>", 106: "<turn|>"}
    vocab = {special.get(token, f"t{token}"): token for token in range(vocab_size)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
    }
    write_text(folder / "tokenizer.json", tokenizer)
    write_text(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
        },
    )


def build_tree(folder: Path, tree: Path, **params: Any) -> Checkpoint:
    """Run stage `checkpoint` on a published folder into `tree` and open the result."""
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
    layers = layers.get("text_config", layers).get("num_hidden_layers")
    tree.mkdir(parents=True)
    stage.run(
        Job(
            inputs={"source": folder},
            digests={},
            params={"source": folder.name, "num_hidden_layers": layers, **params},
            out=tree,
        )
    )
    return Checkpoint.open(tree)


def build_tiny(root: Path, dims: Dims = Dims(), **options: Any) -> Checkpoint:
    """A checked tiny checkpoint in one call: writes `root/published`, builds and opens `root/checkpoint`."""
    return build_tree(write_checkpoint(root / "published", dims, **options), root / "checkpoint")


def _random(generator: np.random.Generator, name: str, shape: tuple[int, ...], dims: Dims) -> np.ndarray:
    values = generator.standard_normal(shape).astype(np.float32)
    if name.endswith("layer_scalar"):
        return 0.75 + 0.2 * generator.random(shape, dtype=np.float32)
    if name.endswith("norm.weight"):
        return 1 + 0.2 * values
    if name == "embed_tokens_per_layer.weight":
        return values * dims.hidden_size_per_layer_input**-0.5
    return values * shape[-1] ** -0.5
