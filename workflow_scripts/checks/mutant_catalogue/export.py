"""Faults of bundles and of what drives them: wiring, storage, interface, description."""

from workflow_scripts.checks.mutant_catalogue.mutant import Edit, Mutant

_CORE = "gemma4_tiny_hostcache_L10_fp32.aimodel"
_FRONTEND = "gemma4_tiny_frontend_int8.aimodel"
_HEAD = "gemma4_tiny_fp16_head.aimodel"
_CHUNK2 = "gemma4_tiny_hostcache_chunk2_int8.aimodel"
_DECODE = "gemma4_tiny_decode_int4lin.aimodel"
_RING = "gemma4_tiny_ring_L10_fp32.aimodel"


def _fault(
    name: str,
    fault: str,
    gate: str,
    target: str,
    file: str,
    old: str,
    new: str,
    check: str,
    alone: bool = False,
) -> Mutant:
    edits = (Edit(f"workflow_scripts/{file}", old, new),)
    return Mutant(name, fault, gate, target, edits, check=check, alone=alone)


MUTANTS = (
    _fault(
        "outputs_swapped",
        "the core gives values under the name of keys",
        "numbers",
        _CORE,
        "model/hostcache.py",
        "torch.stack([pair.key for pair in sliding]),\n            torch.stack([pair.value for pair in sliding]),",
        "torch.stack([pair.value for pair in sliding]),\n            torch.stack([pair.key for pair in sliding]),",
        "logits against the oracle",
    ),
    _fault(
        "output_type",
        "the head's logits are float16",
        "structure",
        _HEAD,
        "model/heads.py",
        "return torch.tanh(scores / self.softcap) * self.softcap",
        "return (torch.tanh(scores / self.softcap) * self.softcap).to(torch.float16)",
        "interface",
    ),
    _fault(
        "column_one_off",
        "the host writes the current column one too far",
        "numbers",
        _CORE,
        "coreai/host_cache.py",
        "cache[:, :, :, self.position] =",
        "cache[:, :, :, min(self.position + 1, self.context - 1)] =",
        "logits against the oracle",
    ),
    _fault(
        "own_column_unseen",
        "a whole decoder reads its kv_cache before it writes the current column",
        "numbers",
        _DECODE,
        "model/kv_state.py",
        "cache[slot : slot + 1, :, :, self._count - 1 : self._count] = wide[None]\n"
        "            seen.append(cache[slot][..., :head_dim] if missing else cache[slot])",
        "seen.append(cache[slot][..., :head_dim] if missing else cache[slot])\n"
        "            cache[slot : slot + 1, :, :, self._count - 1 : self._count] = wide[None]",
        "logits against the decode reference",
    ),
    _fault(
        "ring_wraps_early",
        "a ring wraps one position too early",
        "numbers",
        _RING,
        "model/kv_state.py",
        "torch.arange(positions, dtype=torch.int32) % window",
        "torch.arange(positions, dtype=torch.int32) % (window - 1)",
        "logits",
    ),
    _fault(
        "chunk_slots_turned",
        "the plan of the chunks gives a chunk its cache slots in reverse",
        "chunks",
        "ios-ane",
        "model/chunks.py",
        'return {"kind": "cache", "cache": cache, "slots": chunk.slots[kind]}\n    producer',
        'return {"kind": "cache", "cache": cache, "slots": chunk.slots[kind][::-1]}\n    producer',
        "hidden state of the chain",
    ),
    _fault(
        "chunk_producer",
        "the plan gives the last chunk another slot than the producer's",
        "chunks",
        "ios-ane",
        "model/chunks.py",
        '"slot": producer.slot,',
        '"slot": 0,',
        "hidden state of the chain",
    ),
    _fault(
        "chunk_window",
        "the plan of the chunks tells the host no window",
        "chunks",
        "ios-ane",
        "stages/package.py",
        'return plan_json(plan, chunks["compute"], chunks["bundles"])',
        'told = plan_json(plan, chunks["compute"], chunks["bundles"])\n'
        '    for chunk in told["chunks"]:\n'
        '        for tensor in chunk["inputs"].values():\n'
        '            if "window" in tensor["source"]:\n'
        '                tensor["source"]["window"] = None\n'
        "    return told",
        "plan of the chunks",
    ),
    _fault(
        "plan_mask_weak",
        "the packaged plan says -40 where chunks were judged with -1e4",
        "chunks",
        "ios-ane",
        "stages/package.py",
        'return plan_json(plan, chunks["compute"], chunks["bundles"])',
        'return plan_json(plan, chunks["compute"], chunks["bundles"]) | {"masked": -40.0}',
        "plan of the chunks",
        alone=True,
    ),
    _fault(
        "mask_beyond_float16",
        "the plan's mask is -1e9, which float16 makes infinite",
        "fp16",
        "ios-ane",
        "model/chunks.py",
        "MASKED = -1e4",
        "MASKED = -1e9",
        "nothing overflows",
        alone=True,
    ),
    _fault(
        "chunk_gate_by_tanh",
        "a chunk spells its gelu out with a tanh, which the Neural Engine does not run",
        "ane",
        _CHUNK2,
        "model/ane_layers.py",
        'gate = nn.functional.gelu(self.per_layer_input_gate(_column(h)), approximate="tanh")',
        "gate = self.per_layer_input_gate(_column(h))\n"
        "        inner = 0.7978845608 * gate * (1 + 0.044715 * gate * gate)\n"
        "        gate = 0.5 * gate * (1 + torch.tanh(inner))",
        "tanh",
        alone=True,
    ),
    _fault(
        "chunk_scalar_ignored",
        "layers of a chunk are not scaled",
        "numbers",
        _CHUNK2,
        "model/ane_layers.py",
        "return h * self.layer_scalar",
        "return h",
        "hidden",
    ),
    _fault(
        "int8_called_int4",
        "4-bit codes are stored in 8 bits",
        "structure",
        _DECODE,
        "model/linear.py",
        "{4: torch.int4, 8: torch.int8}",
        "{4: torch.int8, 8: torch.int8}",
        "weights stored as the recipe says",
    ),
    _fault(
        "codes_packed_high_first",
        "4-bit codes are packed with the first one in the high bits",
        "structure",
        _DECODE,
        "coreai/packed_codes.py",
        "packed = nibbles[0::2].copy()\n        packed[: len(nibbles) // 2] |= nibbles[1::2] << 4",
        "packed = nibbles[0::2] << 4\n        packed[: len(nibbles) // 2] |= nibbles[1::2]",
        "weights stored as the recipe says",
    ),
    _fault(
        "another_recipe_said",
        "bundles say that they are of another recipe",
        "structure",
        _HEAD,
        "coreai/weights_bundle.py",
        '"recipe": weights.recipe',
        '"recipe": "fp32"',
        "says its recipe",
    ),
    _fault(
        "compute_said",
        "the front end says float32 and gives float16",
        "structure",
        _FRONTEND,
        "stages/export_frontend.py",
        '"tables": "int8", "compute": compute,',
        '"tables": "int8", "compute": "fp32",',
        "says its compute",
        alone=True,
    ),
    _fault(
        "path_left_in",
        "bundles say in which folder their weights lay",
        "structure",
        _HEAD,
        "coreai/weights_bundle.py",
        '"recipe": weights.recipe,',
        '"recipe": weights.recipe, "made_from": str(weights.tree),',
        "no path of",
    ),
    _fault(
        "frontend_scale_shortened",
        "the front end has 0.7 for 1 / sqrt(2)",
        "numbers",
        _FRONTEND,
        "stages/export_frontend.py",
        "input_scale=tables.meta.input_scale",
        "input_scale=0.7",
        "per_layer_inputs",
        alone=True,
    ),
    _fault(
        "cache_growth_loses",
        "a host that enlarges a kv_cache keeps its first 64 columns alone",
        "long_run",
        "gpu-pipelined/gemma4_tiny_decode_int4lin",
        "coreai/decode_host.py",
        "new[:, :, :, : old.shape[3]] = old",
        "new[:, :, :, : min(64, old.shape[3])] = old[:, :, :, :64]",
        "tokens",
        alone=True,
    ),
)
