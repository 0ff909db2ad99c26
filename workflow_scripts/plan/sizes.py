"""Predicted bytes of results, from the checkpoint's shapes and the recipes alone.

Arrays are counted exactly; the text of indices and programs is estimated by layer. Of E2B's shapes weights, tables and
bundles came within 0.1% of what was built, small chunks within 0.5%; the tiny model's bundles hold much text, and came
within 9%. Apart from `quantize.encode`, whose compiled loops take seconds to import.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from workflow_scripts.checkpoint.layout import EMBEDDING, expected_tensors, published_tensors
from workflow_scripts.checkpoint.text_config import TextConfig
from workflow_scripts.configuration.data import DECODE_FORMS, STATE_CORES
from workflow_scripts.quantize.kinds import matrix_kind
from workflow_scripts.quantize.recipes import DenseEncoding, Encoding, LinearEncoding, get_recipe

_BYTES = {"fp16": 2, "fp32": 4, "float16": 2, "float32": 4}
_BFLOAT16 = 2
_VECTOR = 4  # norms and layer scalars are float32 in weights and bundles
_HEADS = ("head", "head_argmax", "head_argmax_metal", "ane_head")
# Graph form -> kinds of matrices whose palettes its Metal kernels read, with float16 entries in every compute type.
_IN_KERNELS = {"hostcache_metal": ("mlp",), "head_argmax_metal": ("head",)}
# Measured bytes of text: of a program by layer, with a kv_cache in states, and around the layers; of an index by layer.
_TEXT, _TEXT_OF_LAYER, _TEXT_OF_STATES, _INDEX_OF_LAYER = 5_000, 12_000, 14_000, 7_000

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """The sizes of one model's results, all in bytes."""

    config: TextConfig

    def checkpoint(self) -> int:
        """The text decoder as published in bfloat16, with the dead tensors of its KV-shared layers."""
        return _BFLOAT16 * sum(map(math.prod, published_tensors(self.config).values()))

    def weights(self, recipe: str) -> int:
        """A result of stage `weights`: every code takes a byte there, whatever its bits."""
        encoding = get_recipe(recipe).encoding
        return _INDEX_OF_LAYER * self.config.num_hidden_layers + sum(
            _stored(encoding(name), shape) if len(shape) > 1 else _VECTOR * math.prod(shape)
            for name, shape in self._tensors().items()
        )

    def tables(self, int4: bool) -> int:
        """Raw tables with their context projection."""
        hidden, row = self.config.hidden_size, self._row()
        projection = _VECTOR * (row * hidden + self.config.hidden_size_per_layer_input)
        return self._embedding(hidden, int4) + self._embedding(row, int4) + projection

    def bundle(
        self,
        form: str,
        compute: str,
        recipe: str | None,
        layers: tuple[int, int] | None = None,
        functions: int = 1,
        int4: bool = False,
    ) -> int:
        """A bundle of a graph form.

        `recipe` is None for a front end, `layers` the range of a chunk; `functions` share their constants, and `int4`
        says that the tables of a decoder lie on the 4-bit grid.
        """
        if recipe is None:
            return self.tables(int4=False) + _TEXT
        value, encoding = _BYTES[compute], get_recipe(recipe).encoding
        in_kernels = _IN_KERNELS.get(form, ())
        constants = sum(
            _shipped(encoding(name), shape, 2 if matrix_kind(name) in in_kernels else value)
            if len(shape) > 1
            else _VECTOR * math.prod(shape)
            for name, shape in self._held(form, layers).items()
        )
        if (
            form in DECODE_FORMS
        ):  # the embedding and the context projection, which a host computes for other forms
            constants += (
                self._embedding(self.config.hidden_size, int4) + value * self._row() * self.config.hidden_size
            )
        first, last = layers or (0, 0 if form in _HEADS else self.config.num_hidden_layers)
        text = _TEXT_OF_STATES if form in (*DECODE_FORMS, *STATE_CORES) else _TEXT_OF_LAYER
        return constants + functions * (_TEXT + text * (last - first))

    def logits(self, positions: int) -> int:
        """Float32 logits of some positions, as the oracle and the references keep them."""
        return 4 * positions * self.config.vocab_size

    def _embedding(self, width: int, int4: bool) -> int:
        """A table: int8 rows with a float32 scale each, or 4-bit codes with a float16 step for every 32."""
        return self.config.vocab_size * (width * 9 // 16 if int4 else width + 4)

    def _row(self) -> int:
        return self.config.num_hidden_layers * self.config.hidden_size_per_layer_input

    def _tensors(self) -> Shapes:
        """The tensors of stage `weights`; the tables are another stage's."""
        return _only(
            expected_tensors(self.config),
            lambda name: name.startswith("layers.") or name in ("norm.weight", EMBEDDING),
        )

    def _held(self, form: str, layers: tuple[int, int] | None) -> Shapes:
        """The tensors that a bundle holds."""
        tensors = self._tensors()
        if form in _HEADS:
            return {EMBEDDING: tensors[EMBEDDING]}
        if layers is not None:
            prefixes = tuple(f"layers.{layer}." for layer in range(*layers))
            return _only(tensors, lambda name: name.startswith(prefixes))
        return tensors if form in DECODE_FORMS else _only(tensors, lambda name: name != EMBEDDING)


def _stored(encoding: Encoding, shape: tuple[int, ...]) -> int:
    """A matrix in a result of stage `weights`."""
    if isinstance(encoding, DenseEncoding):
        return _BYTES[encoding.dtype] * math.prod(shape)
    return math.prod(shape) + _beside_codes(encoding, shape, 2)


def _shipped(encoding: Encoding, shape: tuple[int, ...], value: int) -> int:
    """A matrix in a bundle: codes in their bits; plain numbers, steps and entries of codebooks in `value` bytes."""
    if isinstance(encoding, DenseEncoding):
        return value * math.prod(shape)
    return math.prod(shape) * encoding.bits // 8 + _beside_codes(encoding, shape, value)


def _beside_codes(encoding: Encoding, shape: tuple[int, ...], value: int) -> int:
    if isinstance(encoding, LinearEncoding):
        return value * math.prod(shape) // encoding.block_size
    return value * (shape[0] // encoding.group_size << encoding.bits)


def _only(shapes: Shapes, wanted: Callable[[str], bool]) -> Shapes:
    return {name: shape for name, shape in shapes.items() if wanted(name)}
