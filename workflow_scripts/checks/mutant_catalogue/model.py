"""Faults of the model as it is authored: what the original does otherwise."""

from workflow_scripts.checks.mutant_catalogue.mutant import Edit, Mutant

_ORACLE = "logits against the oracle"
_CORE = "gemma4_tiny_hostcache_L10_fp32.aimodel"


def _against_the_oracle(name: str, fault: str, file: str, old: str, new: str) -> Mutant:
    """A fault in what bundles and references share: only the original model tells."""
    edits = (Edit(f"workflow_scripts/{file}", old, new),)
    return Mutant(name, fault, "numbers", _CORE, edits, check=_ORACLE)


MUTANTS = (
    _against_the_oracle(
        "norm_one_plus_weight",
        "norms multiply by 1 + weight, as Gemma 2 and 3 do",
        "model/norm.py",
        "return rms_normalize(x, self.eps) * self.weight",
        "return rms_normalize(x, self.eps) * (1 + self.weight)",
    ),
    _against_the_oracle(
        "attention_scaled",
        "attention scores are divided by sqrt(head_dim)",
        "model/attention.py",
        "attn_mask=rows, scale=1.0)",
        "attn_mask=rows)",
    ),
    _against_the_oracle(
        "gelu_exact",
        "the MLP's gelu is exact, not the tanh form",
        "model/decoder.py",
        'self.down_proj(nn.functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))',
        "self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))",
    ),
)
