"""Faults of the model as it is authored: what the original does otherwise.

Bundles and the references that they are compared with share this code, so that only the original model tells: the
float32 core of the recipe `fp32` is held to its logits.
"""

from workflow_scripts.checks.mutant_catalogue.mutant import Mutant, edited

_ORACLE = "logits against the oracle"
_CORE = "gemma4_tiny_hostcache_L10_fp32.aimodel"
_FRONTEND = "gemma4_tiny_frontend_int8.aimodel"
_HEAD = "gemma4_tiny_fp16_head.aimodel"


def _core(name: str, fault: str, file: str, old: str, new: str, check: str = _ORACLE) -> Mutant:
    return edited(name, fault, "numbers", _CORE, file, old, new, check)


def _part(name: str, fault: str, target: str, check: str, file: str, old: str, new: str) -> Mutant:
    """A fault of a front end or a head, which are compared with other code than their own."""
    return edited(name, fault, "numbers", target, file, old, new, check)


MUTANTS = (
    _core(
        "norm_one_plus_weight",
        "norms multiply by 1 + weight, as Gemma 2 and 3 do",
        "model/norm.py",
        "return rms_normalize(x, self.eps) * self.weight",
        "return rms_normalize(x, self.eps) * (1 + self.weight)",
    ),
    _core(
        "norm_eps",
        "eps of the norms is 1e-3, not 1e-6",
        "model/norm.py",
        ".mean(-1, keepdim=True) + eps, -0.5)",
        ".mean(-1, keepdim=True) + 1e-3, -0.5)",
    ),
    _core(
        "v_norm_missing",
        "values are not normed",
        "model/attention.py",
        "value = rms_normalize(self._split(self.v_proj(x), self.kv_heads), self.eps)",
        "value = self._split(self.v_proj(x), self.kv_heads)",
    ),
    _core(
        "qk_norms_swapped",
        "queries are normed with the weight of the keys, and keys with that of the queries",
        "model/attention.py",
        'self.v_proj = linear(prefix + "v_proj.weight")\n',
        'self.v_proj = linear(prefix + "v_proj.weight")\n'
        "            self.q_norm, self.k_norm = self.k_norm, self.q_norm\n",
    ),
    _core(
        "attention_scaled",
        "attention scores are divided by sqrt(head_dim)",
        "model/attention.py",
        "attn_mask=rows, scale=1.0)",
        "attn_mask=rows)",
    ),
    _core(
        "rope_theta",
        "sliding layers take the full layers' theta",
        "model/rope.py",
        "inverse_frequencies(rope, head_dim)",
        "inverse_frequencies(RopeSpec(1e6, rope.rope_type, rope.partial_rotary_factor), head_dim)",
    ),
    _core(
        "rope_whole_head",
        "full layers rotate the whole head, not a quarter of it",
        "model/frequencies.py",
        "rotated = int(rope.partial_rotary_factor * head_dim) // 2",
        "rotated = head_dim // 2",
    ),
    _core(
        "rope_exponents",
        "exponents of a partial rotation are divided by the rotated part, not by head_dim",
        "model/frequencies.py",
        "Decimal(head_dim)",
        "Decimal(2 * rotated)",
    ),
    _core(
        "rope_sign",
        "heads are rotated the other way round",
        "model/rope.py",
        "torch.cat([-sin, sin], -1)",
        "torch.cat([sin, -sin], -1)",
    ),
    _core(
        "rope_interleaved",
        "pairs of a rotation are neighbours (GPT-J), not halves (NeoX)",
        "model/rope.py",
        "first, second = x.chunk(2, -1)\n    return x * cos + torch.cat([second, first], -1) * signed_sin",
        "pairs = x.reshape(*x.shape[:-1], -1, 2)\n"
        "    first, second = pairs[..., 0], pairs[..., 1]\n"
        "    (cos, _), (_, sin) = cos.chunk(2, -1), signed_sin.chunk(2, -1)\n"
        "    return torch.stack([first * cos - second * sin, second * cos + first * sin], -1).reshape(x.shape)",
    ),
    _core(
        "window_of_the_reference",
        "the decoder's own masks let sliding layers see one position too far back",
        "model/decoder.py",
        "(distance < config.sliding_window)",
        "(distance <= config.sliding_window)",
        "logits against the recipe's reference",
    ),
    _core(
        "sliding_unmasked",
        "the decoder's own masks let sliding layers see everything",
        "model/decoder.py",
        "additive((distance >= 0) & (distance < config.sliding_window), dtype)",
        "additive(distance >= 0, dtype)",
        "logits against the recipe's reference",
    ),
    _core(
        "window_of_the_host",
        "the host lets sliding layers see one position too far back",
        "coreai/host_cache.py",
        "max(0, self.position - self._window + 1)",
        "max(0, self.position - self._window)",
    ),
    _core(
        "mask_too_weak",
        "the host's mask is -1: hidden columns leak",
        "coreai/host_cache.py",
        "MASKED = -1e4",
        "MASKED = -1.0",
    ),
    _core(
        "wrong_producer",
        "shared layers read the first layer's K/V of their type, not the last one's",
        "model/decoder.py",
        "self.config.layer_types[index], self.config.producer(index)\n",
        "self.config.layer_types[index], self.config.producer(index)\n"
        "            if producer != index:\n"
        "                producer = self.config.slots(kind)[0]\n",
    ),
    _core(
        "double_wide_ignored",
        "shared layers use the first half of their wide MLP",
        "model/decoder.py",
        'return self.down_proj(nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))',
        'wide = nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x)\n'
        "        return self.down_proj(nn.functional.pad(wide[..., :256], (0, wide.shape[-1] - 256)))",
    ),
    _core(
        "layer_scalar_ignored",
        "layers are not scaled",
        "model/decoder.py",
        "return h * self.layer_scalar",
        "return h",
    ),
    _core(
        "gelu_exact",
        "the MLP's gelu is exact, not the tanh form",
        "model/decoder.py",
        'gelu(self.gate_proj(x), approximate="tanh")',
        "gelu(self.gate_proj(x))",
    ),
    _core(
        "post_norm_late",
        "the norm behind attention is taken after the sum, not of the branch",
        "model/decoder.py",
        "h = h + self.post_attention_layernorm(self.self_attn(x, rotation, mask, seen))",
        "h = self.post_attention_layernorm(h + self.self_attn(x, rotation, mask, seen))",
    ),
    _core(
        "mlp_norms_swapped",
        "the norms before and behind the MLP are swapped",
        "model/decoder.py",
        "self.mlp = MLP(layer, linear)\n"
        '        self.post_feedforward_layernorm = norm(prefix + "post_feedforward_layernorm.weight")',
        "self.mlp = MLP(layer, linear)\n"
        "        self.post_feedforward_layernorm = self.pre_feedforward_layernorm\n"
        '        self.pre_feedforward_layernorm = norm(prefix + "post_feedforward_layernorm.weight")',
    ),
    _core(
        "ple_gate_silu",
        "the gate of the per-layer embedding is a silu",
        "model/decoder.py",
        'gate = nn.functional.gelu(self.per_layer_input_gate(as_dtype(h, self.dtype)), approximate="tanh")',
        "gate = nn.functional.silu(self.per_layer_input_gate(as_dtype(h, self.dtype)))",
    ),
    _core(
        "ple_of_another_layer",
        "layers take the per-layer embedding of the layer before",
        "model/decoder.py",
        "per_layer_inputs[:, :, index]",
        "per_layer_inputs[:, :, index - 1]",
    ),
    _part(
        "ple_sum_unscaled",
        "the front end adds both parts of the per-layer inputs without 1/sqrt(2)",
        _FRONTEND,
        "per_layer_inputs",
        "model/frontend.py",
        "+ token) * self.input_scale",
        "+ token)",
    ),
    _core(
        "embedding_unscaled",
        "the reference's embeddings are not scaled by sqrt(hidden)",
        "model/front_end_reference.py",
        'rows("embed_tokens.weight", ids)[None] * config.hidden_size**0.5',
        'rows("embed_tokens.weight", ids)[None]',
    ),
    _part(
        "frontend_ple_unscaled",
        "the front end does not scale the token part of the per-layer inputs",
        _FRONTEND,
        "per_layer_inputs",
        "model/frontend.py",
        ".reshape(1, 1, self.mix.layers, -1) * self.token_scale",
        ".reshape(1, 1, self.mix.layers, -1)",
    ),
    _part(
        "frontend_unscaled",
        "the front end does not scale embeddings by sqrt(hidden)",
        _FRONTEND,
        "inputs_embeds",
        "model/frontend.py",
        "return as_dtype(self.table(input_ids) * self.scale, self.dtype)",
        "return as_dtype(self.table(input_ids), self.dtype)",
    ),
    _part(
        "softcap_missing",
        "logits are not soft-capped",
        _HEAD,
        "logits",
        "model/heads.py",
        "return torch.tanh(scores / self.softcap) * self.softcap",
        "return scores",
    ),
    _part(
        "softcap_20",
        "logits are soft-capped at 20, not at 30",
        _HEAD,
        "logits",
        "model/heads.py",
        "self.softcap, self.dtype = lm_head, softcap, dtype",
        "self.softcap, self.dtype = lm_head, 20.0, dtype",
    ),
)
