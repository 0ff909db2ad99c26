"""Faults of the gather tables: what reads them is compared with the tables at hand, so only their gate tells."""

from workflow_scripts.checks.mutant_catalogue.mutant import TINY_QAT, Mutant, edited

_TABLES = "gemma4_gather_raw"
_EMBED, _PER_LAYER = "embed_tokens.weight", "embed_tokens_per_layer.weight"


def _table(
    name: str, fault: str, file: str, old: str, new: str, check: str = "", alone: bool = False
) -> Mutant:
    return edited(name, fault, "tables", _TABLES, f"tables/{file}", old, new, check, alone)


def _rows(name: str, fault: str, new: str, check: str, alone: bool = False) -> Mutant:
    """A fault in the int8 rows as they are written."""
    return _table(name, fault, "writer.py", "rows_out.write(quantized.data)", new, check, alone)


def _int4(name: str, fault: str, old: str, new: str) -> Mutant:
    """A fault in the 4-bit rows of a checkpoint from quantization-aware training."""
    target, file = "gemma4_qat_gather_raw_int4", "tables/int4_writer.py"
    return edited(name, fault, "tables", target, file, old, new, _EMBED, config=TINY_QAT)


MUTANTS = (
    _rows(
        "rows_shifted",
        "every row is that of the id before",
        "rows_out.write(np.roll(quantized, 1, axis=0).data)",
        _EMBED,
    ),
    _rows(
        "layers_transposed",
        "per-layer rows lie as [ld, L], not as [L, ld]",
        "layers = checkpoint.config.num_hidden_layers if table == PER_LAYER else 1\n"
        "            rows_out.write(np.ascontiguousarray(\n"
        "                quantized.reshape(len(quantized), layers, -1).swapaxes(1, 2)).data)",
        _PER_LAYER,
    ),
    _rows(
        "zeroed",
        "the rows of the embedding are zeros",
        "rows_out.write((quantized * np.int8(table != EMBED)).data)",
        _EMBED,
    ),
    _rows(
        "unused_row",
        "one number in the embedding of an id that no dialogue uses is off by one",
        "quantized[-1, 0] ^= table == EMBED\n            rows_out.write(quantized.data)",
        _EMBED,
        alone=True,
    ),
    _table(
        "scale_of_the_next_row",
        "every row has the scale of the row behind it",
        "writer.py",
        "scales_out.write(scales.astype(FLOAT).data)",
        "scales_out.write(np.roll(scales, -1).astype(FLOAT).data)",
        "error of a scale",
    ),
    _table(
        "tables_of_another_checkpoint",
        "the tables say that they are of another checkpoint",
        "streams.py",
        "checkpoint=checkpoint.digest",
        "checkpoint=checkpoint.digest[::-1]",
        "checkpoint of the tables",
    ),
    _table(
        "embedding_scale",
        "meta.json has no scale for embeddings",
        "streams.py",
        "embed_scale_main=math.sqrt(config.hidden_size)",
        "embed_scale_main=1.0",
        "embed_scale_main",
    ),
    _table(
        "projection_transposed",
        "the context projection lies column by column",
        "streams.py",
        "out.write(rows.astype(FLOAT, copy=False).data)",
        "out.write(rows.astype(FLOAT, copy=False).T.copy().data)",
        "per_layer_model_projection",
    ),
    _int4(
        "int4_steps_shifted",
        "every block of a 4-bit table has the step of the block beside it",
        "steps_out.write(steps.data)",
        "steps_out.write(np.roll(steps, 1, axis=1).data)",
    ),
    _int4(
        "int4_nibbles_swapped",
        "4-bit tables are packed with the first number in the high nibble",
        "return nibbles[:, 0::2] | (nibbles[:, 1::2] << 4)",
        "return nibbles[:, 1::2] | (nibbles[:, 0::2] << 4)",
    ),
)
