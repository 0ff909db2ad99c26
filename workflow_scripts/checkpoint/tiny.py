"""Train an embedded checkpoint: a tiny Gemma 4 that has every signature feature of the real one.

    python -m workflow_scripts.checkpoint.tiny OUT_DIR                     as E2B: the pipeline's default
    python -m workflow_scripts.checkpoint.tiny --shape e4b-qat OUT_DIR     as E4B, and on a 4-bit grid

It is a test double. Nothing of it comes from Google's weights: the architecture is Gemma 4's, the
numbers are learned here, in minutes on one core, from `tiny_dialogues.yaml`.

Two wishes pull against each other. The answers must survive honest 4-bit weights, and they must NOT
survive a decoder that is wrong (another norm, a forgotten scale, the wrong shared K/V). So the
training holds the top-2 logit margin in a band instead of letting it grow, and does so under weight
noise of 4-bit size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch.nn import functional
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    GemmaTokenizer,
    PreTrainedConfig,
)

from workflow_scripts.checkpoint.tiny_dialogues import DIALOGUES, Dialogue, Turn
from workflow_scripts.checkpoint.tiny_grid import BLOCK, on_grid
from workflow_scripts.checkpoint.tiny_shapes import E2B, SHAPES, Plan, Shape
from workflow_scripts.errors import UserError
from workflow_scripts.files import new_tree, tree_files, write_atomic, write_json

PAD, EOS, BOS, END_OF_TURN = 0, 1, 2, 106
VOCAB_SIZE = 1024
MAX_POSITIONS = 512
GLOBAL_HEAD_DIM = 64
IGNORED = -100

# Accents of the dialogues that get a token of their own; every other character outside ASCII
# (and the emoji) is spelled in bytes.
ACCENTS = "éà"

# `(content | trim)` and the newline after <turn|> are as in Gemma 4's own template.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n'"
    " + message['content'] | trim + '<turn|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"
)


# --- tokenizer -----------------------------------------------------------------------------------


def reserved_tokens() -> list[str]:
    """Ids 0-4 and 105/106 as in Gemma 4's vocabulary, then the 256 byte tokens."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    unused = [f"<unused{i}>" for i in range(100)]
    return [*special, *unused, "<|turn>", "<turn|>", *(f"<0x{byte:02X}>" for byte in range(256))]


def learnable_text(dialogues: Sequence[Dialogue]) -> list[str]:
    """The texts that merges are learned from; characters left to byte fallback become spaces."""
    texts = [text for dialogue in dialogues for turn in dialogue.turns for text in turn]
    texts += ["user\n", "model\n", "system\n"]
    return ["".join(c if c.isascii() or c in ACCENTS else " " for c in text) for text in texts]


def learn_bpe(dialogues: Sequence[Dialogue]) -> dict:
    """Learn vocabulary and merges.

    The pre-tokenizer only shapes the merges: words, punctuation, newlines apart, digits one by one
    as in Gemma. GemmaTokenizer itself splits nothing, and needs not: no merge crosses these borders.
    """
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("▁", "merged_with_next"),
            pre_tokenizers.Punctuation("isolated"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split("\n", "isolated"),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=reserved_tokens(),
        initial_alphabet=["\n", "▁", *map(chr, range(33, 127)), *ACCENTS],
        show_progress=False,
    )
    tokenizer.train_from_iterator(learnable_text(dialogues), trainer)
    return json.loads(tokenizer.to_str())["model"]


def build_tokenizer(dialogues: Sequence[Dialogue]) -> GemmaTokenizer:
    """A GemmaTokenizer of exactly VOCAB_SIZE ids; the chat template writes <bos>, the tokenizer does not."""
    bpe = learn_bpe(dialogues)
    vocab = bpe["vocab"] | {f"<unused{i}>": i for i in range(len(bpe["vocab"]), VOCAB_SIZE)}
    return GemmaTokenizer(
        vocab=vocab,
        merges=[tuple(merge) for merge in bpe["merges"]],
        add_bos_token=False,
        padding_side="left",
        extra_special_tokens={"sot_token": "<|turn>", "eot_token": "<turn|>"},
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
    )


# --- model ---------------------------------------------------------------------------------------


def build_config(shape: Shape) -> Gemma4Config:
    """A released shape in small.

    hidden_size 96: its square root, the embedding scale, is no bf16 number, as with E2B's 1536 and E4B's 2560.
    sliding_window 8 is shorter than every prompt.
    """
    text = Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=len(shape.layer_types),
        layer_types=list(shape.layer_types),
        num_attention_heads=4,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=32,
        global_head_dim=GLOBAL_HEAD_DIM,
        hidden_size_per_layer_input=32,
        num_kv_shared_layers=shape.num_kv_shared_layers,
        use_double_wide_mlp=shape.use_double_wide_mlp,
        sliding_window=8,
        final_logit_softcapping=30.0,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
        },
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=BOS,
        attention_k_eq_v=False,
    )
    return Gemma4Config(
        text_config=text.to_dict(), vision_config=None, audio_config=None, eos_token_id=[EOS, END_OF_TURN]
    )


def norm_size(name: str) -> float:
    """Typical weight of an RMSNorm.

    Small after a branch, so that the residual stream, with the embedding scale and the layer scalars
    in it, keeps counting. Small on q and k, so that attention is not so sharp that fp16 rounding shows
    (scores have no 1/sqrt(head_dim)).
    """
    if ".post_" in name:
        return 0.5
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return 0.6
    return 1.0


@torch.no_grad()
def build_model(shape: Shape) -> Gemma4ForConditionalGeneration:
    """A fresh fp32 model in which no feature sits at an identity value. Uses torch's global generator."""
    config = build_config(shape)
    config._attn_implementation = "eager"
    model = Gemma4ForConditionalGeneration(config).float()
    text = model.model.language_model
    for name, weight in text.named_parameters():
        if name.endswith("norm.weight"):
            weight.copy_(norm_size(name) * torch.exp(0.5 * torch.randn_like(weight)))
        elif name == "embed_tokens_per_layer.weight":
            weight.normal_(0, config.text_config.hidden_size_per_layer_input**-0.5)
        else:
            weight.normal_(0, weight.shape[-1] ** -0.5)
    for layer, scalar in zip(text.layers, shape.layer_scalars, strict=True):
        layer.layer_scalar.fill_(scalar)
    return model


def weight_matrices(model: Gemma4ForConditionalGeneration) -> list[torch.nn.Parameter]:
    """Every 2-D weight: layer matrices, the tied head, the PLE table and its context projection."""
    return [weight for weight in model.parameters() if weight.dim() == 2]


# --- data ----------------------------------------------------------------------------------------


def render(tokenizer: GemmaTokenizer, turns: Sequence[Turn], question: str | None = None) -> list[int]:
    """Ids of finished turns and, where a question is given, of the prompt for its answer."""
    messages = [
        {"role": role, "content": text}
        for turn in turns
        for role, text in (("user", turn.user), ("assistant", turn.model))
    ]
    if question is not None:
        messages.append({"role": "user", "content": question})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=question is not None)
    return tokenizer(text, add_special_tokens=False).input_ids


@dataclass(frozen=True)
class Answer:
    """One trained answer: prompt ids, and the answer's ids with <turn|> last."""

    dialogue: str
    prompt: list[int]
    ids: list[int]


def answers_of(tokenizer: GemmaTokenizer, dialogue: Dialogue) -> list[Answer]:
    """One Answer for every turn of a dialogue."""
    found = []
    for k, turn in enumerate(dialogue.turns):
        prompt = render(tokenizer, dialogue.turns[:k], turn.user)
        through_newline = render(tokenizer, dialogue.turns[: k + 1])
        found.append(Answer(dialogue.name, prompt, through_newline[len(prompt) : -1]))
    return found


def labelled(tokenizer: GemmaTokenizer, dialogue: Dialogue) -> tuple[list[int], list[int]]:
    """Ids of a whole dialogue, and for each position the id to predict next, or IGNORED."""
    ids = render(tokenizer, dialogue.turns)
    labels = [IGNORED] * len(ids)
    for answer in answers_of(tokenizer, dialogue):
        first = len(answer.prompt) - 1
        labels[first : first + len(answer.ids)] = answer.ids
    return ids, labels


Batch = tuple[torch.Tensor, torch.Tensor]


def padded(rows: Sequence[tuple[list[int], list[int]]]) -> Batch:
    """Stack rows, padded on the right: harmless under a causal mask."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [PAD] * (width - len(row)) for row, _ in rows])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in rows])
    return ids, labels


def build_batches(tokenizer: GemmaTokenizer, dialogues: Sequence[Dialogue]) -> list[Batch]:
    """All dialogues, in batches of like length so that little is spent on padding."""
    rows = sorted((labelled(tokenizer, dialogue) for dialogue in dialogues), key=lambda row: len(row[0]))
    groups: list[list] = []
    for row in rows:
        if groups and len(row[0]) <= 2 * len(groups[-1][0][0]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [padded(group) for group in groups]


# --- training ------------------------------------------------------------------------------------


def block_step(weight: torch.Tensor) -> torch.Tensor:
    """Step of symmetric absmax int4 in blocks of 32 along the input dim; shape [rows, blocks, 1]."""
    return weight.unflatten(1, (-1, BLOCK)).abs().amax(-1, keepdim=True).clamp_min(1e-12) / 7


def fake_int4(weight: torch.Tensor) -> torch.Tensor:
    """The matrix after int4 block quantization and back; same shape and dtype."""
    step = block_step(weight)
    return ((weight.unflatten(1, (-1, BLOCK)) / step).round() * step).flatten(1)


def with_noise(weight: torch.Tensor, amount: float) -> torch.Tensor:
    """The matrix plus normal noise with a standard deviation of `amount` block steps."""
    noise = torch.randn_like(weight).unflatten(1, (-1, BLOCK)) * (amount * block_step(weight))
    return weight + noise.flatten(1)


@contextmanager
def perturbed(
    weights: Sequence[torch.nn.Parameter], change: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[None]:
    """Hold changed weights for one forward and backward pass: gradients go straight through."""
    kept = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.data.copy_(change(weight.data))
    try:
        yield
    finally:
        for weight, value in zip(weights, kept, strict=True):
            weight.data.copy_(value)


def answer_logits(
    model: Gemma4ForConditionalGeneration, batches: Sequence[Batch]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [tokens, vocab] and target ids [tokens] of all answer positions of all batches."""
    logits, targets = [], []
    for ids, labels in batches:
        keep = labels != IGNORED
        logits.append(model(input_ids=ids, use_cache=False).logits[keep].float())
        targets.append(labels[keep])
    return torch.cat(logits), torch.cat(targets)


def margins_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Target logit minus the best other one; negative where greedy decoding would go wrong."""
    target = logits.gather(1, targets[:, None])
    others = logits.scatter(1, targets[:, None], float("-inf"))
    return target[:, 0] - others.amax(1)


def band_loss(margins: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Zero while every margin lies in the plan's band; linear in the mean, quadratic in outliers."""
    below = functional.relu(plan.margin_low - margins)
    above = functional.relu(margins - plan.margin_high)
    return (below + below.square()).mean() + 0.3 * above.mean()


def noise_share(step: int, plan: Plan) -> float:
    """0 while the answers are learned, then rising to 1 within as many steps again."""
    learning = max(1, round(plan.learning_share * plan.steps))
    return min(1.0, max(0.0, (step - learning) / learning))


def weight_change(step: int, plan: Plan) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a step does to every matrix: real int4 every third time, noise of the same size otherwise.

    In the plan's last part both are done to the matrix on its grid.
    """
    share = noise_share(step, plan)
    change = fake_int4 if share > 0 and step % 3 == 0 else partial(with_noise, amount=share * plan.noise)
    if step < grid_step(plan):
        return change
    return lambda weight: change(on_grid(weight))


def grid_step(plan: Plan) -> int:
    """The first step with the matrices on a grid; the number of steps where there is none."""
    return plan.steps if plan.grid_from is None else round(plan.grid_from * plan.steps)


@torch.no_grad()
def put_on_grid(model: Gemma4ForConditionalGeneration) -> None:
    """Leave every matrix where training has seen it."""
    for weight in weight_matrices(model):
        weight.copy_(on_grid(weight))


def train(model: Gemma4ForConditionalGeneration, batches: Sequence[Batch], plan: Plan) -> None:
    """Learn the answers first (cross-entropy fades out), then hold their margins in the band under noise."""
    weights = weight_matrices(model)
    optimizer = torch.optim.AdamW(model.parameters(), plan.learning_rate, betas=(0.9, 0.95), weight_decay=0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, plan.learning_rate, total_steps=plan.steps, pct_start=0.1
    )
    started = time.monotonic()
    model.train()
    for step in range(plan.steps):
        optimizer.zero_grad(set_to_none=True)
        with perturbed(weights, weight_change(step, plan)):
            logits, targets = answer_logits(model, batches)
            margins = margins_of(logits, targets)
            learning = (1 - noise_share(step, plan)) * functional.cross_entropy(logits, targets)
            (learning + band_loss(margins, plan)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 20 == 0 or step == plan.steps - 1:
            report(step, plan, margins, time.monotonic() - started)
    model.eval()


def report(step: int, plan: Plan, margins: torch.Tensor, seconds: float) -> None:
    """One progress line with the time left."""
    low, high = margins.aminmax()
    left = seconds / (step + 1) * (plan.steps - step - 1)
    print(
        f"step {step + 1:4d}/{plan.steps}  margins {low:6.2f} .. {high:5.2f}, mean {margins.mean():5.2f}"
        f"  about {left:3.0f} s left",
        flush=True,
    )


# --- the folder ----------------------------------------------------------------------------------


def hub_config(config: Gemma4Config) -> dict:
    """config.json in the spelling of the published checkpoints.

    transformers 5.24 itself saves `per_layer_config` in place of `global_head_dim`; the published
    files have only the latter, and both load (measured).
    """
    values = config.to_diff_dict() | {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "audio_config": None,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "vision_config": None,
    }
    generic = PreTrainedConfig().to_dict().keys() - {"model_type"}
    text = {key: value for key, value in config.text_config.to_dict().items() if key not in generic}
    del text["per_layer_config"]
    values["text_config"] = text | {
        "dtype": "bfloat16",
        "global_head_dim": GLOBAL_HEAD_DIM,
        "num_global_key_value_heads": None,
    }
    return values


def generation_config() -> dict:
    """Greedy decoding that stops on <eos> or <turn|>."""
    return {
        "bos_token_id": BOS,
        "do_sample": False,
        "eos_token_id": [EOS, END_OF_TURN],
        "pad_token_id": PAD,
    }


def write_checkpoint(model: Gemma4ForConditionalGeneration, tokenizer: GemmaTokenizer, folder: Path) -> None:
    """Write weights in bf16 (without the tied lm_head), configs and tokenizer into an empty folder."""
    state = model.state_dict()
    stored = {name: state[name].bfloat16().contiguous() for name in sorted(state) if name != "lm_head.weight"}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", hub_config(model.config))
    write_json(folder / "generation_config.json", generation_config())
    tokenizer.save_pretrained(folder)


@dataclass(frozen=True)
class Row:
    """What one dialogue looks like from disk; margins are minima over its answer tokens."""

    dialogue: str
    tokens: int
    margin: float
    margin_int4: float
    exact: bool


@torch.no_grad()
def greedy_is_exact(model: Gemma4ForConditionalGeneration, answer: Answer) -> bool:
    """Whether cached greedy decoding gives exactly the answer's ids and stops with <turn|>."""
    prompt = torch.tensor([answer.prompt])
    out = model.generate(prompt, max_new_tokens=len(answer.ids) + 8, do_sample=False)
    return out[0, len(answer.prompt) :].tolist() == answer.ids


@torch.no_grad()
def smallest_margin(model: Gemma4ForConditionalGeneration, batch: Batch) -> float:
    """Smallest margin of the right token over a batch's answer tokens, teacher-forced."""
    return margins_of(*answer_logits(model, [batch])).min().item()


def load_checkpoint(folder: Path) -> tuple[Gemma4ForConditionalGeneration, GemmaTokenizer]:
    """The reference reading of a folder: transformers, eager attention, fp32."""
    model = AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def inspect(folder: Path, dialogues: Sequence[Dialogue]) -> list[Row]:
    """Answer every dialogue from disk."""
    model, tokenizer = load_checkpoint(folder)
    rows = []
    for dialogue in dialogues:
        answers = answers_of(tokenizer, dialogue)
        batch = padded([labelled(tokenizer, dialogue)])
        with perturbed(weight_matrices(model), fake_int4):
            margin_int4 = smallest_margin(model, batch)
        rows.append(
            Row(
                dialogue=dialogue.name,
                tokens=sum(len(answer.ids) for answer in answers),
                margin=smallest_margin(model, batch),
                margin_int4=margin_int4,
                exact=all(greedy_is_exact(model, answer) for answer in answers),
            )
        )
    return rows


def model_card(shape: Shape, rows: Sequence[Row], parameters: int, plan: Plan) -> str:
    """README.md of the folder."""
    table = "\n".join(f"| {r.dialogue} | {r.tokens} | {r.margin:.2f} | {r.margin_int4:.2f} |" for r in rows)
    return shape.title + shape.card.format(
        parameters=parameters,
        steps=plan.steps,
        grid_step=grid_step(plan),
        seed=plan.seed,
        low=plan.margin_low,
        high=plan.margin_high,
        rows=table,
    )


def refuse_foreign_folder(out: Path, shape: Shape) -> None:
    """Raise UserError where `out` holds something that this command did not write for this shape."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out}: is a file; give a folder for the tiny checkpoint")
    card = out / "README.md"
    ours = card.is_file() and card.read_text(encoding="utf-8").startswith(shape.title)
    if any(out.iterdir()) and not ours:
        raise UserError(
            f"{out}: holds files that this command did not write for this shape; give a new folder, or empty "
            "this one"
        )


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """One thread, a fixed seed and deterministic kernels for the block; the caller's settings after it."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)


def train_into(folder: Path, plan: Plan, dialogues: Sequence[Dialogue], shape: Shape = E2B) -> list[Row]:
    """Train, write everything but the card into an empty folder, and answer every dialogue from it."""
    with reproducible(plan.seed):
        tokenizer = build_tokenizer(dialogues)
        model = build_model(shape)
        train(model, build_batches(tokenizer, dialogues), plan)
        if plan.grid_from is not None:
            put_on_grid(model)
        write_checkpoint(model, tokenizer, folder)
        rows = inspect(folder, dialogues)
    parameters = sum(weight.numel() for weight in model.parameters())
    write_atomic(folder / "README.md", model_card(shape, rows, parameters, plan))
    return rows


def train_tiny_checkpoint(out: Path, shape: Shape = E2B) -> None:
    """Train an embedded checkpoint and put it at `out`, in one rename.

    Raises UserError where `out` holds something else, or where an answer read back from disk is not exact.
    """
    refuse_foreign_folder(out, shape)
    with new_tree(out) as folder:
        rows = train_into(folder, shape.plan, DIALOGUES, shape)
        print(closing_table(rows, sum(path.stat().st_size for path in tree_files(folder))), flush=True)
        wrong = [row.dialogue for row in rows if not row.exact]
        if wrong:
            raise UserError(
                f"{out}: not written; these dialogues are not answered exactly: {', '.join(wrong)}"
            )


def closing_table(rows: Sequence[Row], size: int) -> str:
    """What the command prints last."""
    head = f"{'dialogue':14s} {'tokens':>6s} {'margin':>7s} {'int4':>6s}  ok"
    lines = [
        f"{r.dialogue:14s} {r.tokens:6d} {r.margin:7.2f} {r.margin_int4:6.2f}  {'yes' if r.exact else 'NO'}"
        for r in rows
    ]
    total = f"{'total':14s} {sum(r.tokens for r in rows):6d} {min(r.margin for r in rows):7.2f}"
    total += f" {min(r.margin_int4 for r in rows):6.2f}  {size:,} bytes"
    return "\n".join([head, *lines, total])


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: train into OUT_DIR."""
    parser = argparse.ArgumentParser(
        prog="python -m workflow_scripts.checkpoint.tiny", description=main.__doc__
    )
    parser.add_argument("--shape", choices=SHAPES, default="e2b", help="default: %(default)s")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    chosen = parser.parse_args(arguments)
    try:
        train_tiny_checkpoint(chosen.out, SHAPES[chosen.shape])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
