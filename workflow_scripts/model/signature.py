"""The I/O contract of every graph form: function -> inputs, outputs and states with dtype and shape.

Export traces with it, gates compare a finished bundle with it, hosts allocate by it. Pure data: no torch here.
Names and shapes are those of the published bundles, which apps load by name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workflow_scripts.checkpoint.text_config import FULL, SLIDING, TextConfig
from workflow_scripts.errors import UserError


@dataclass(frozen=True)
class Length:
    """A dimension that may change from call to call: its bounds, and the size that export traces with.

    Dimensions of one name have one size in any call. The bounds are the published graphs' own.
    """

    name: str
    lowest: int
    highest: int
    traced: int


ANY_LENGTH = -1
"""How a finished bundle describes a dimension that may change."""


@dataclass(frozen=True)
class TensorSpec:
    """Element type (numpy's name) and shape: static, but for a `Length`."""

    dtype: str
    shape: tuple[int | Length, ...]

    def described(self) -> tuple[int, ...]:
        """The shape as a finished bundle tells it."""
        return tuple(ANY_LENGTH if isinstance(size, Length) else size for size in self.shape)

    def traced(self) -> tuple[int, ...]:
        """The shape that export traces with."""
        return tuple(size.traced if isinstance(size, Length) else size for size in self.shape)

    def sized(self, length: int) -> tuple[int, ...]:
        """The shape with `length` for every dimension that may change."""
        return tuple(length if size < 0 else size for size in self.described())


@dataclass(frozen=True)
class FunctionSpec:
    """Inputs, outputs and states of one function, in order. A state is read and written in place by a call."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    states: dict[str, TensorSpec] = field(default_factory=dict)


COMPUTE_DTYPES = {"fp32": "float32", "fp16": "float16"}
CACHE_NAMES = {SLIDING: "sliding", FULL: "full"}
"""Layer type -> how the tensors of its caches begin, in the order of a chunk's inputs and outputs."""
_TOKEN = TensorSpec("int32", (1, 1))


def hostcache_core(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """One position; `context` past columns in the caches, the current one is column `context` of the masks.

    Raises UserError for a context beyond what the model was made for.
    """
    _check_context(config, context)
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


def ane_chunk(
    config: TextConfig, context: int, compute: str, *, layers: Sequence[int]
) -> dict[str, FunctionSpec]:
    """Layers [first, last) of `hostcache_core`, with those of its tensors that they use.

    A chunk holds the cache slots of its own layers only. Where the layers read the K/V of a layer of another chunk, it
    gets them whole, past columns and behind them the current one: `prod_*`, joined by the host.
    Raises UserError for layers that the model does not have, and as `hostcache_core` does.
    """
    first, last = layers
    if not 0 <= first < last <= config.num_hidden_layers:
        raise UserError(
            f"layers [{first}, {last}) are no range of the model's {config.num_hidden_layers} layers, from 0 on"
        )
    core, dtype = hostcache_core(config, context, compute)["main"], COMPUTE_DTYPES[compute]
    inputs = {
        "hidden_in": core.inputs["inputs_embeds"],
        "per_layer_inputs": TensorSpec(dtype, (1, 1, last - first, config.hidden_size_per_layer_input)),
        "position_ids": _TOKEN,
    }
    outputs = {"hidden": core.outputs["hidden"]}
    for kind in (FULL, SLIDING):
        if kind in config.layer_types[first:last]:
            mask = f"causal_mask_{CACHE_NAMES[kind]}"
            inputs[mask] = core.inputs[mask]
    for kind, name in CACHE_NAMES.items():
        owned = len(owned_slots(config, kind, layers))
        for cache in (f"{name}_k", f"{name}_v") if owned else ():
            inputs[cache] = TensorSpec(dtype, (owned, *core.inputs[cache].shape[1:]))
            current = f"{cache}_cur"
            outputs[current] = TensorSpec(dtype, (owned, *core.outputs[current].shape[1:]))
    for kind, name in CACHE_NAMES.items():
        if borrows(config, kind, layers):
            head_dim = core.inputs[f"{name}_k"].shape[-1]
            whole = TensorSpec(dtype, (1, config.num_key_value_heads, context + 1, head_dim))
            inputs |= {f"prod_{name}_kv_k": whole, f"prod_{name}_kv_v": whole}
    return {"main": FunctionSpec(inputs, outputs)}


def owned_slots(config: TextConfig, kind: str, layers: Sequence[int]) -> list[int]:
    """The slots of a type's caches that layers [first, last) fill."""
    return [slot for slot, layer in enumerate(config.slots(kind)) if layers[0] <= layer < layers[1]]


def borrows(config: TextConfig, kind: str, layers: Sequence[int]) -> bool:
    """Whether a layer of the type in [first, last) reads the K/V of a layer before `first`."""
    return any(config.layer_types[i] == kind and config.producer(i) < layers[0] for i in range(*layers))


def ane_head(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """The next token id from operators of the Neural Engine; a host sees no difference to `head_argmax`."""
    return head_argmax(config, context, compute)


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


UNIFIED_CACHES = ("keyCache", "valueCache")
SLIDING_CACHES = ("slidingKeyCache", "slidingValueCache")
FULL_CACHES = ("fullKeyCache", "fullValueCache")
_RING = "decode_"
_TRACED_POSITIONS = 65  # of the published export
_TRACED_QUERIES, _TRACED_OFFSET = 16, 8  # likewise


def decode(
    config: TextConfig, context: int, compute: str, *, cache_minimum: int, tables: str = "int8"
) -> dict[str, FunctionSpec]:
    """One token id and its row of the per-layer table (times the root of the row's size) -> logits.

    `position_ids` counts from 0 to the current position: its length says where the cache is written. Slots are
    unified: the sliding layers', then the full layers'; each as wide as the widest head. The caches' length is the
    host's choice, from `cache_minimum` to `context` (UserError where this is no range). A row is the same in every
    layout of the `tables`.
    """
    dtype = COMPUTE_DTYPES[compute]
    tokens = (1, 1, config.num_hidden_layers, config.hidden_size_per_layer_input)
    length = _caches_length(config, context, cache_minimum)
    inputs = _decode_inputs(length) | {"ple_tokens": TensorSpec(dtype, tokens)}
    return {"main": _unified(config, inputs, dtype, length)}


def decode_tbl(
    config: TextConfig, context: int, compute: str, *, cache_minimum: int, tables: str = "int8"
) -> dict[str, FunctionSpec]:
    """As `decode`, but the whole per-layer table, in the layout `tables`, is an input that never changes."""
    length = _caches_length(config, context, cache_minimum)
    inputs = _decode_inputs(length) | _table_inputs(config, tables)
    return {"main": _unified(config, inputs, COMPUTE_DTYPES[compute], length)}


def decode_ring(
    config: TextConfig, context: int, compute: str, *, capacities: Sequence[int], tables: str = "int8"
) -> dict[str, FunctionSpec]:
    """As `decode_tbl`, all static: one function `decode_N` per capacity N of the full layers' caches.

    `position_ids` [1, 1] is the current position; the sliding caches are rings of the window's size. The functions
    share the weights: a host changes to a larger one as it copies its full caches into larger ones. `context` is
    the largest capacity. Raises UserError for capacities that do not ascend to it.
    """
    _check_context(config, context)
    if list(capacities) != sorted({*capacities}) or not capacities or capacities[-1] != context:
        raise UserError(
            f"capacities are {list(capacities)}: they must ascend, and end with the context {context}"
        )
    dtype = COMPUTE_DTYPES[compute]
    inputs = {"input_ids": _TOKEN, "position_ids": _TOKEN} | _table_inputs(config, tables)
    outputs = {"logits": TensorSpec(dtype, (1, 1, config.vocab_size))}
    return {
        ring_function(capacity): FunctionSpec(inputs, outputs, _ring_states(config, dtype, capacity))
        for capacity in capacities
    }


def ring_function(capacity: int) -> str:
    """The name of the function of `decode_ring` with so many columns."""
    return f"{_RING}{capacity}"


def ring_capacities(functions: Iterable[str]) -> list[int]:
    """The capacities of a bundle's functions, ascending; none where it is of another form."""
    return sorted(int(name.removeprefix(_RING)) for name in functions if name.startswith(_RING))


def conversation_positions(form: str, context: int) -> int:
    """How many ids a token decoder takes: a growing kv_cache never fills its last column (the published bound)."""
    return context if form == "decode_ring" else context - 1


def stateful_core(
    config: TextConfig, context: int, compute: str, *, cache_minimum: int
) -> dict[str, FunctionSpec]:
    """S positions per call, caches of both layer types in four states; `position_ids` counts from 0 to the last.

    Function `step` is the static twin of `main`: one position, `position_ids` [1, 1] names it, and the caches have
    `context` columns. A conversation whose caches have as many can be handed from one to the other and back.
    """
    dtype, length = COMPUTE_DTYPES[compute], _caches_length(config, context, cache_minimum)
    return {
        "main": _stateful(config, dtype, length, context - 2, _long_states(config, dtype, length)),
        "step": _step(config, dtype, _long_states(config, dtype, context)),
    }


def ring_core(
    config: TextConfig, context: int, compute: str, *, cache_minimum: int
) -> dict[str, FunctionSpec]:
    """As `stateful_core`, but the sliding caches are rings of the window's size; S is at most the window."""
    dtype, length = COMPUTE_DTYPES[compute], _caches_length(config, context, cache_minimum)
    block = min(config.sliding_window, context - 2)
    return {
        "main": _stateful(config, dtype, length, block, _ring_states(config, dtype, length)),
        "step": _step(config, dtype, _ring_states(config, dtype, context)),
    }


def blend_core(config: TextConfig, context: int, compute: str) -> dict[str, FunctionSpec]:
    """One position, all static: a one-hot `write_mask` names the column that is written, masks what is seen.

    The masks have a column per position of the caches; the own one is among them.
    """
    _check_context(config, context)
    dtype = COMPUTE_DTYPES[compute]
    row = TensorSpec(dtype, (1, 1, 1, context))
    inputs = {
        **_embedded(config, dtype, 1),
        "position_ids": _TOKEN,
        "write_mask": row,
        "causal_mask_full": row,
        "causal_mask_sliding": row,
    }
    outputs = {"hidden": TensorSpec(dtype, (1, 1, config.hidden_size))}
    return {"main": FunctionSpec(inputs, outputs, _long_states(config, dtype, context))}


def _check_context(config: TextConfig, context: int) -> None:
    if context > config.max_position_embeddings:
        raise UserError(
            f"context is {context} in the workflow's config, but the checkpoint's max_position_embeddings is "
            f"{config.max_position_embeddings}: choose at most that"
        )


def _caches_length(config: TextConfig, context: int, minimum: int) -> Length:
    _check_context(config, context)
    if not 4 <= minimum < context:
        raise UserError(
            f"cache_minimum is {minimum} in the workflow's config: it must be 4 or more, and below the "
            f"context {context}"
        )
    return Length("cache", minimum, context, minimum)


def _decode_inputs(caches: Length) -> dict[str, TensorSpec]:
    # Traced with less positions than the caches have columns: export would take more of them for a rule.
    positions = Length("positions", 2, caches.highest - 1, min(_TRACED_POSITIONS, caches.traced - 1))
    return {"input_ids": _TOKEN, "position_ids": TensorSpec("int32", (1, positions))}


def _table_inputs(config: TextConfig, tables: str) -> dict[str, TensorSpec]:
    """Inputs for the whole per-layer table: int8 rows with a scale each, or 4-bit codes with a step per block of 32.

    Raises UserError for a layout that does not exist.
    """
    rows, width = (
        config.vocab_size_per_layer_input,
        config.num_hidden_layers * config.hidden_size_per_layer_input,
    )
    layouts = {
        "int8": {"ple_table": TensorSpec("int8", (rows, width)), "ple_scale": TensorSpec("float32", (rows,))},
        "int4-b32": {
            "ple_table": TensorSpec("uint8", (rows, width // 2)),  # two codes in a byte
            "ple_step": TensorSpec("float16", (rows, width // 32)),
        },
    }
    if tables not in layouts:
        raise UserError(f"there is no layout `{tables}` of raw tables: it is one of {', '.join(layouts)}")
    return layouts[tables]


def _unified(config: TextConfig, inputs: dict[str, TensorSpec], dtype: str, length: Length) -> FunctionSpec:
    slots = len(config.slots(SLIDING)) + len(config.slots(FULL))
    width = max(config.head_dim, config.global_head_dim)
    cache = TensorSpec(dtype, (slots, 1, config.num_key_value_heads, length, width))
    outputs = {"logits": TensorSpec(dtype, (1, 1, config.vocab_size))}
    return FunctionSpec(inputs, outputs, dict.fromkeys(UNIFIED_CACHES, cache))


def _stateful(
    config: TextConfig, dtype: str, caches: Length, block: int, states: dict[str, TensorSpec]
) -> FunctionSpec:
    """The core of blocks of at most `block` positions."""
    queries = Length("queries", 1, block, min(_TRACED_QUERIES, block, caches.traced // 2))
    positions = Length(
        "positions", 1, caches.highest - 1, min(queries.traced + _TRACED_OFFSET, caches.traced - 1)
    )
    inputs = {**_embedded(config, dtype, queries), "position_ids": TensorSpec("int32", (1, positions))}
    outputs = {"hidden": TensorSpec(dtype, (1, queries, config.hidden_size))}
    return FunctionSpec(inputs, outputs, states)


def _step(config: TextConfig, dtype: str, states: dict[str, TensorSpec]) -> FunctionSpec:
    """The core of one position, all static."""
    inputs = {**_embedded(config, dtype, 1), "position_ids": _TOKEN}
    return FunctionSpec(inputs, {"hidden": TensorSpec(dtype, (1, 1, config.hidden_size))}, states)


def _embedded(config: TextConfig, dtype: str, length: int | Length) -> dict[str, TensorSpec]:
    per_layer = (1, length, config.num_hidden_layers, config.hidden_size_per_layer_input)
    return {
        "inputs_embeds": TensorSpec(dtype, (1, length, config.hidden_size)),
        "per_layer_inputs": TensorSpec(dtype, per_layer),
    }


def _long_states(config: TextConfig, dtype: str, length: int | Length) -> dict[str, TensorSpec]:
    return _states(config, dtype, SLIDING, length) | _states(config, dtype, FULL, length)


def _ring_states(config: TextConfig, dtype: str, length: int | Length) -> dict[str, TensorSpec]:
    return _states(config, dtype, SLIDING, config.sliding_window) | _states(config, dtype, FULL, length)


def _states(config: TextConfig, dtype: str, kind: str, length: int | Length) -> dict[str, TensorSpec]:
    slots, names = config.slots(kind), SLIDING_CACHES if kind == SLIDING else FULL_CACHES
    shape = (len(slots), 1, config.num_key_value_heads, length, config.layer_head_dim(slots[0]))
    return dict.fromkeys(names, TensorSpec(dtype, shape))


_FORMS = {
    "hostcache_core": hostcache_core,
    "hostcache_metal": hostcache_metal,
    "head": head,
    "head_argmax": head_argmax,
    "head_argmax_metal": head_argmax_metal,
    "frontend": frontend,
    "ane_chunk": ane_chunk,
    "ane_head": ane_head,
    "decode": decode,
    "decode_tbl": decode_tbl,
    "decode_ring": decode_ring,
    "stateful_core": stateful_core,
    "ring_core": ring_core,
    "blend_core": blend_core,
}


def signature(
    form: str, config: TextConfig, context: int, compute: str, **options: Any
) -> dict[str, FunctionSpec]:
    """Signature of a graph form; `options` are the form's own. Raises UserError for a form that does not exist."""
    if form not in _FORMS:
        raise UserError(f"there is no graph form `{form}`: it is one of {', '.join(_FORMS)}")
    return _FORMS[form](config, context, compute, **options)
