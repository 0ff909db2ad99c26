"""Reads every value of a checkpoint once, in blocks: refuses what fp16 cannot hold, and hashes the content."""

import hashlib
from collections.abc import Iterator

import numpy as np

from workflow_scripts.checkpoint.safetensors import DTYPES, TensorInfo, map_tensor
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.errors import UserError
from workflow_scripts.files import canonical_json, sha256_text
from workflow_scripts.progress import Meter

_DIGEST_FORMAT = 1
_BLOCK_BYTES = 16 << 20

# Without the sign bit, the codes of a binary float are ordered as the magnitudes they stand for, with Inf and NaN on
# top. So one integer maximum per block finds all three faults. Per dtype: the code's type, the code of the largest
# magnitude that is at most 65504 (fp16's largest), and the code of infinity.
_CODES: dict[str, tuple[type[np.unsignedinteger], int, int]] = {
    "BF16": (np.uint16, 0x477F, 0x7F80),
    "F16": (np.uint16, 0x7BFF, 0x7C00),
    "F32": (np.uint32, 0x477F_E000, 0x7F80_0000),
}


def check_tensor(name: str, info: TensorInfo, meter: Meter) -> str:
    """Read one tensor, told to `meter` by its bytes; returns their hex sha256.

    Raises UserError with name, file and place of the first value that is NaN, infinite or above 65504 in magnitude.
    """
    digest = hashlib.sha256()
    for start, codes in _blocks(info):
        digest.update(codes)
        meter.add(codes.nbytes)
        if codes.size and int(_magnitudes(codes).max()) > _CODES[info.dtype][1]:
            raise UserError(_fault(name, info, start, codes))
    return digest.hexdigest()


def check_head(head: TensorInfo, embedding: TensorInfo, embedding_sha256: str) -> None:
    """Refuse a stored lm_head that is not the tied embedding, byte for byte."""
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    meter = Meter("validate lm_head.weight", head.size)
    if not same or check_tensor("lm_head.weight", head, meter) != embedding_sha256:
        raise UserError(
            f"{head.path}: tie_word_embeddings is true, but lm_head.weight differs from embed_tokens.weight; one of "
            "the two is wrong: fetch the checkpoint again, or drop lm_head.weight if the tied embedding is meant"
        )


def content_digest(config: TextConfig, tensors: dict[str, TensorInfo], sha256: dict[str, str]) -> str:
    """One hex sha256 over the canonical configuration and the content of all text tensors."""
    listing = [
        [name, tensors[name].dtype, list(tensors[name].shape), sha256[name]] for name in sorted(tensors)
    ]
    return sha256_text(
        canonical_json({"format": _DIGEST_FORMAT, "text_config": config.to_json(), "tensors": listing})
    )


def _blocks(info: TensorInfo) -> Iterator[tuple[int, np.ndarray]]:
    """Start index and integer codes of consecutive parts of the flattened tensor."""
    code_type = _CODES[info.dtype][0]
    codes = map_tensor(info).reshape(-1).view(code_type)
    step = _BLOCK_BYTES // codes.itemsize
    for start in range(0, codes.size, step):
        yield start, codes[start : start + step]


def _magnitudes(codes: np.ndarray) -> np.ndarray:
    return codes & codes.dtype.type(np.iinfo(codes.dtype).max >> 1)


def _fault(name: str, info: TensorInfo, start: int, codes: np.ndarray) -> str:
    _, largest, infinity = _CODES[info.dtype]
    first = int(np.argmax(_magnitudes(codes) > largest))
    value = float(codes[first : first + 1].view(DTYPES[info.dtype])[0])
    place = [int(index) for index in np.unravel_index(start + first, info.shape)]
    finite = int(_magnitudes(codes[first : first + 1])[0]) < infinity
    reason = "which overflows fp16 (at most 65504)" if finite else "not a finite number"
    return (
        f"{info.path}: tensor {name} is {value:g} at {place}, {reason}: fetch or train the checkpoint again"
    )
