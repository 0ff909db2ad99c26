"""Faults of the folders that people download, on their way there and afterwards."""

import json
from pathlib import Path

from workflow_scripts.checks.mutant_catalogue.mutant import NEXT_RUN, VERIFY, Edit, Mutant, edited

_DECODE_FOLDER = "gpu-pipelined/gemma4_tiny_decode_int4lin"
_TOKENIZER = 'package.place_tokenizer(job.inputs["checkpoint"] / "source", job.out)\n'


def _tokenizer_of_macos(name: str, fault: str, change: str, check: str, alone: bool = False) -> Mutant:
    """A fault in the tokenizer files of one folder; `change` are lines over `spec`, its tokenizer.json."""
    lines = [
        'if job.params["folder"] == "macos":',
        "    import json",
        '    path = job.out / package.TOKENIZER / "tokenizer.json"',
        '    spec = json.loads(path.read_text(encoding="utf-8"))',
        *(f"    {line}" for line in change.split("\n")),
        "    path.unlink()",
        '    path.write_text(json.dumps(spec), encoding="utf-8")',
    ]
    new = _TOKENIZER + "".join(f"    {line}\n" for line in lines)
    return edited(name, fault, "tokens", "macos", "stages/package.py", _TOKENIZER, new, check, alone)


def _released(name: str, fault: str, damage, check: str) -> Mutant:  # noqa: ANN001
    """A fault in a finished release."""
    return Mutant(name, fault, VERIFY, "release", check=check, damage=damage)


def _stale_file(results: Path) -> None:
    (results / "release/macos/gemma4_tiny_old_head.aimodel.zip").write_bytes(b"an older head")


def _altered_byte(results: Path) -> None:
    _alter(results / "release/ios-frontend/gemma4_gather_raw/embed_tokens.i8")


def _missing_file(results: Path) -> None:
    (results / "release/macos/tokenizer/tokenizer_config.json").unlink()


def _sums_follow(results: Path) -> None:
    """A plan is edited, and its line in SHA256SUMS as well."""
    import hashlib

    release, name = results / "release", "macos/gemma4_plan.json"
    before = hashlib.sha256((release / name).read_bytes()).hexdigest()
    _replace(release / name, '"context": 320', '"context": 640')
    after = hashlib.sha256((release / name).read_bytes()).hexdigest()
    _replace(release / "SHA256SUMS", before, after)


def _another_digest(results: Path) -> None:
    """In provenance.json the head has the digest of the core."""
    path = results / "release/macos/provenance.json"
    digests = {name: made_of["digest"] for name, made_of in json.loads(path.read_text()).items()}
    head, core = "gemma4_tiny_head_argmax_kernel.aimodel", "gemma4_tiny_metal_int8v3_L10.aimodel"
    _replace(path, digests[head], digests[core])


def _swapped_bundle(results: Path) -> None:
    """The head of another recipe lies under the name of this one, as long as it was there."""
    bundles = results / "bundles"
    other = bundles / "gemma4_tiny_head_argmax_int4km.aimodel/main.mlirb"
    path = bundles / "gemma4_tiny_head_argmax_kernel.aimodel/main.mlirb"
    content = other.read_bytes()
    path.unlink()
    path.write_bytes(content)


def _byte_of_a_result(results: Path) -> None:
    _alter(results / "weights/int8-kmeans-g32/core.safetensors")


def _alter(path: Path) -> None:
    """Another bit in the middle; never through a link to a stored file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()
    path.write_bytes(content)


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    if old not in text:
        raise ValueError(f"{path.name} does not say {old}")
    path.unlink()
    path.write_text(text.replace(old, new), encoding="utf-8")


MUTANTS = (
    _tokenizer_of_macos(
        "accents_stripped",
        "the tokenizer of one folder takes accents away",
        'strip = [{"type": "NFD"}, {"type": "StripAccents"}]\n'
        'spec["normalizer"] = {"type": "Sequence", "normalizers": [*strip, spec["normalizer"]]}',
        "accents: prompt ids",
        alone=True,
    ),
    _tokenizer_of_macos(
        "vocabulary_swapped",
        "two tokens of the vocabulary have each other's id",
        'vocab = spec["model"]["vocab"]\n'
        'vocab["▁capital"], vocab["▁France"] = vocab["▁France"], vocab["▁capital"]',
        "france: prompt ids",
    ),
    Mutant(
        "vocabulary_too_large",
        "the tokenizer has ids that the embedding has not",
        "stage package",
        "macos",
        (
            Edit(
                "workflow_scripts/stages/package.py",
                "check_vocabulary(tokenizer, config)",
                "import dataclasses\n\n"
                "    check_vocabulary(tokenizer, dataclasses.replace(config, vocab_size=config.vocab_size - 1))",
            ),
        ),
        judged=("gates/tokens/macos",),
        check="vocab_size",
    ),
    edited(
        "no_generation_prompt",
        "the packaged template leaves out where the model's turn begins",
        "tokens",
        "macos",
        "release/package.py",
        "return tokenizer.ChatTokenizer.open(out / TOKENIZER)",
        "path = out / TOKENIZER / tokenizer.TEMPLATE\n"
        '    text = path.read_text(encoding="utf-8").partition("{% if add_generation_prompt")[0]\n'
        "    path.unlink()\n"
        '    path.write_text(text, encoding="utf-8")\n'
        "    return tokenizer.ChatTokenizer.open(out / TOKENIZER)",
        "prompt ids",
    ),
    edited(
        "stop_ids_missing",
        "plans stop at <eos> alone, not at the end of a turn",
        "tokens",
        "macos",
        "stages/package.py",
        "stops = list(tokenizer.stop_token_ids)",
        "stops = [1]",
        "plan: stop tokens",
    ),
    edited(
        "plan_context",
        "plans promise twice the positions that the core has",
        "tokens",
        "macos",
        "stages/package.py",
        'context=job.params["context"],\n        stop',
        'context=2 * job.params["context"],\n        stop',
        "its plan says context",
    ),
    edited(
        "plan_window",
        "plans say another sliding_window",
        "tokens",
        "macos",
        "stages/package.py",
        "text=host_text(config)",
        'text=host_text(config) | {"sliding_window": 16}',
        "plan: shape of the decoder",
    ),
    edited(
        "functions_misnamed",
        "metadata.json names a function that the decoder has not",
        "tokens",
        _DECODE_FOLDER,
        "release/language.py",
        '"function_map": {"main": language["functions"]}',
        '"function_map": {"main": ["decode"]}',
        "names the functions",
    ),
    edited(
        "engine_stops_late",
        "the tokenizer of a language bundle ends an answer at <eos>, not at the end of a turn",
        "tokens",
        _DECODE_FOLDER,
        "release/language.py",
        "    _end_with_turn(folder / TOKENIZER / CONFIG)\n",
        "",
        "eos_token",
    ),
    edited(
        "metadata_stops",
        "metadata.json lacks a stop token that the plan has",
        "tokens",
        _DECODE_FOLDER,
        "release/language.py",
        '"stop_token_ids": stop_token_ids,',
        '"stop_token_ids": stop_token_ids[:1],',
        "stop_token_ids",
    ),
    edited(
        "metadata_context",
        "metadata.json promises twice the positions that the plan does",
        "tokens",
        _DECODE_FOLDER,
        "release/language.py",
        '"max_context_length": language["max_context_length"]',
        '"max_context_length": 2 * language["max_context_length"]',
        "max_context_length",
    ),
    Mutant(
        "head_of_another_recipe",
        "a folder gets the 8-bit head under the name of its 4-bit one",
        "stage release",
        "release",
        (
            Edit(
                "rules/common.smk",
                'f"bundle_{role}": result("bundles", published(key))',
                'f"bundle_{role}": result("bundles", published(key.replace("head_kernel_int4", "head_kernel_int8")))',
            ),
        ),
        judged=("release",),
        check="is published with the digest",
    ),
    Mutant(
        "provenance_of_another",
        "provenance.json gives every bundle the digest of the checkpoint",
        "stage release",
        "release",
        (
            Edit(
                "workflow_scripts/release/package.py",
                '"digest": manifest.digest,',
                '"digest": made_of.inputs.get("checkpoint", manifest.digest),',
            ),
        ),
        judged=("release",),
        check="is not the result that",
    ),
    edited(
        "answer_from_an_old_token",
        "a host that answers freely feeds the token before the last one",
        "chat",
        "macos",
        "release/driver.py",
        "output.append(self._feed(output[-1]))",
        "output.append(self._feed(output[-2:][0]))",
        "",
        alone=True,
    ),
    edited(
        "another_stop_token",
        "one folder ends all its answers but the last with another stop token than the others: the text is the same",
        "agreement",
        "folders",
        "release/chat.py",
        "                text = tokenizer.decode(without_stop(output, plan))\n",
        "                if folder.endswith('macos') and number + 1 < len(turns):\n"
        "                    output[-1] = 1\n"
        "                text = tokenizer.decode(without_stop(output, plan))\n",
        "chat: two_turns, answer 1",
        alone=True,
    ),
    _released(
        "stale_file", "a file of an older release lies in a folder", _stale_file, "not part of the release"
    ),
    _released("altered_byte", "one bit of a table is another", _altered_byte, "embed_tokens.i8: altered"),
    _released("missing_file", "a tokenizer file is missing", _missing_file, "tokenizer_config.json: missing"),
    _released("sums_follow", "a plan is edited, and SHA256SUMS with it", _sums_follow, "SHA256SUMS"),
    _released(
        "another_digest",
        "provenance.json gives a head the digest of a core",
        _another_digest,
        "provenance.json",
    ),
    Mutant(
        "swapped_bundle",
        "in the results the head of another recipe lies under a head's name",
        NEXT_RUN,
        "bundles/gemma4_tiny_head_argmax_kernel.aimodel",
        judged=("release",),
        damage=_swapped_bundle,
    ),
    Mutant(
        "altered_result",
        "one bit of finished weights is another",
        NEXT_RUN,
        "weights/int8-kmeans-g32",
        judged=("release",),
        damage=_byte_of_a_result,
    ),
)
