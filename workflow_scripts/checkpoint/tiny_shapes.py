"""The embedded checkpoints as data: which layers each has, how it is trained, and what its card says."""

from dataclasses import dataclass

SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train.

    For the first `learning_share` of the steps the answers are learned undisturbed. `margin_low` and
    `margin_high` bound the top-2 logit margin (soft-capped logits) of every answer token. `noise` is the
    weight noise's standard deviation in steps of a 4-bit block; rounding to 4 bits has 0.29. From the share
    `grid_from` of the steps on every matrix is on the grid of quantization-aware training, and stored so;
    None: never.
    """

    steps: int = 420
    learning_rate: float = 4e-3
    learning_share: float = 0.35
    margin_low: float = 3.2
    margin_high: float = 4.2
    noise: float = 0.35
    grid_from: float | None = None
    seed: int = 4


@dataclass(frozen=True)
class Shape:
    """What differs between the embedded checkpoints; see `tiny.build_config` for what they share."""

    layer_types: tuple[str, ...]
    layer_scalars: tuple[float, ...]
    num_key_value_heads: int
    num_kv_shared_layers: int
    use_double_wide_mlp: bool
    plan: Plan
    title: str
    card: str


_CARD_HEAD = "---\nlicense: apache-2.0\n---\n\n# "

_E2B_CARD = """
A Gemma 4 text decoder in small ({parameters:,} parameters, bf16, Hugging Face layout), trained from
random numbers on the dialogues of `workflow_scripts/checkpoint/tiny_dialogues.yaml`. **Nothing of it
comes from Google's weights**; it knows nothing else, and its name only says which architecture it has.

It is the pipeline's default checkpoint and its test double, so it has every feature that makes
Gemma 4 hard to re-author: 4:1 sliding and full attention with two head sizes (32 and 64), a window
(8) shorter than any prompt, one K/V head, five KV-shared layers with double-wide MLP, per-layer
embeddings, proportional RoPE, layer scalars that are not 1, logit softcap 30, a tied head and byte
fallback. The square root of its hidden size (96) is no bf16 number.

Made by `python -m workflow_scripts.checkpoint.tiny OUT_DIR`: {steps} steps of AdamW in fp32 on one
thread with seed {seed}. After the answers are learned, weight noise of the size of a 4-bit step is added to
every matrix, and the top-2 logit margin of each answer token is held near {low:g} to {high:g}: high enough
for honest 4-bit weights, low enough that a wrong decoder changes tokens. The same machine writes the
same bytes each time; another CPU may round differently, so this folder is kept in version control.

Figures of this folder (transformers, eager attention, fp32; greedy with the K/V cache). "int4" is the
smallest margin of the right token with every matrix as symmetric int4 in blocks of 32 inputs.

| dialogue | answer tokens | smallest margin | smallest margin, int4 |
|---|---|---|---|
{rows}
"""

_E4B_QAT_CARD = """
The like of `gemma-4-tiny` in the shape of Gemma 4 E4B and as its quantization-aware training leaves it
({parameters:,} parameters, bf16, Hugging Face layout). **Nothing of it comes from Google's weights.**

- 5:1 sliding and full attention in 12 layers (full: 5 and 11), two K/V heads, MLPs of one width, five
  KV-shared layers, whose K/V come from layers 5 and 6; all else as `gemma-4-tiny`.
- Every matrix, the embeddings and the per-layer projection among them, is on a 4-bit grid: in each block
  of 32 along a row, levels -8..7 times one step, in most blocks with the peak at a level below 8.

Made by `python -m workflow_scripts.checkpoint.tiny --shape e4b-qat OUT_DIR`: {steps} steps with seed {seed},
trained as `gemma-4-tiny` is, but with the matrices on the grid from step {grid_step} on (the gradient goes
straight through the rounding).

Figures of this folder (transformers, eager attention, fp32; greedy with the K/V cache). "off the grid" is
the smallest margin of the right token with every matrix as int4 with its step set by the block's peak.

| dialogue | answer tokens | smallest margin | smallest margin, off the grid |
|---|---|---|---|
{rows}
"""

# Multiples of 1/32 are exact in bf16. None is 1, and no two neighbours are equal, so that a scalar
# that is dropped or taken from another layer shows.
_SCALARS = (0.5, 0.8125, 0.625, 1.25, 0.6875, 0.5625, 1.125, 0.75, 0.875, 0.59375, 1.1875, 0.71875)

# Half of the layers KV-shared, so that both layer types lie on both sides.
E2B = Shape(
    layer_types=(*[SLIDING] * 4, FULL) * 2,
    layer_scalars=_SCALARS[:10],
    num_key_value_heads=1,
    num_kv_shared_layers=5,
    use_double_wide_mlp=True,
    plan=Plan(),
    title=_CARD_HEAD + "gemma-4-tiny: the embedded test checkpoint\n",
    card=_E2B_CARD,
)
# In two periods of E4B's layers only a full layer before the sliding one can make the K/V of shared layers: 5, and 6.
E4B_QAT = Shape(
    layer_types=(*[SLIDING] * 5, FULL) * 2,
    layer_scalars=_SCALARS,
    num_key_value_heads=2,
    num_kv_shared_layers=5,
    use_double_wide_mlp=False,
    plan=Plan(grid_from=0.5),
    title=_CARD_HEAD + "gemma-4-tiny-e4b-qat: the embedded test checkpoint of QAT weights\n",
    card=_E4B_QAT_CARD,
)

SHAPES = {"e2b": E2B, "e4b-qat": E4B_QAT}
