"""Faults of the stored weights. References and bundles are made of them, so that only their own gate tells."""

from workflow_scripts.checks.mutant_catalogue.mutant import TINY, TINY_QAT, Mutant, edited

_INT8, _INT4, _LINEAR, _QAT = "int8-kmeans-g32", "int4-kmeans-g32", "int4-linear-b32", "int4-qat-b32"


def _weights(
    name: str, fault: str, recipe: str, file: str, old: str, new: str, check: str, alone: bool = False
) -> Mutant:
    config = TINY_QAT if recipe == _QAT else TINY
    file = f"quantize/{file}"
    return edited(name, fault, "quantization", recipe, file, old, new, check, alone, config=config)


MUTANTS = (
    _weights(
        "steps_of_a_neighbour",
        "every block of a row has the step of the block beside it",
        _LINEAR,
        "encode.py",
        'writer.write(f"{name}.steps", np.concatenate(steps))',
        'writer.write(f"{name}.steps", np.roll(np.concatenate(steps), 1, axis=1))',
        "least SNR",
    ),
    _weights(
        "blocks_across_rows",
        "the steps are those of blocks along the columns",
        _LINEAR,
        "linear.py",
        "block_peaks(rows, block_size, name, first_row) / levels_to_peak",
        "block_peaks(np.ascontiguousarray(rows.T).reshape(rows.shape), block_size, name, first_row)"
        " / levels_to_peak",
        "a weight off its code",
    ),
    _weights(
        "codebook_of_the_group_before",
        "every group of rows has the codebook of the group before",
        _INT8,
        "encode.py",
        'writer.write(f"{name}.codebook", np.concatenate(codebooks))',
        'writer.write(f"{name}.codebook", np.roll(np.concatenate(codebooks), 1, axis=0))',
        "quality report",
    ),
    _weights(
        "codebook_rounded",
        "codebooks are cut to bfloat16 on their way",
        _INT8,
        "encode.py",
        "codebooks.append(block.codebook)",
        "bits = block.codebook.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)\n"
        "        codebooks.append(bits.view(np.float32).astype(np.float16))",
        "quality report",
    ),
    _weights(
        "codebook_descending",
        "codebooks descend, as no reader was promised",
        _INT4,
        "palette.py",
        "return PaletteBlock(indices.reshape(rows.shape), entries.astype(np.float16), quality)",
        "last = np.uint8((1 << bits) - 1)\n"
        "    turned = np.ascontiguousarray(entries[:, ::-1])\n"
        "    return PaletteBlock(last - indices.reshape(rows.shape), turned.astype(np.float16), quality)",
        "a weight off its code",
    ),
    _weights(
        "palettes_evenly_spaced",
        "entries lie evenly between the least and the largest weight, each weight with its nearest",
        _INT4,
        "palette.py",
        "    if not np.isfinite(entries).all():\n",
        "    for group, values in enumerate(groups.view(rows.dtype).astype(np.float64)):\n"
        "        even = np.linspace(values.min(), values.max(), 1 << bits).astype(np.float16).astype(np.float64)\n"
        "        indices[group] = np.searchsorted((even[1:] + even[:-1]) / 2, values)\n"
        "        entries[group] = even\n"
        "        error = np.square(values - even[indices[group]]).sum()\n"
        "        squares[group] = np.square(values).sum(), error\n"
        "    if not np.isfinite(entries).all():\n",
        "entries off the means",
    ),
    _weights(
        "tensor_skipped",
        "one matrix stays float16",
        _LINEAR,
        "recipes.py",
        "return self.encodings[matrix_kind(tensor)]",
        'return FLOAT16 if tensor == "layers.0.self_attn.q_proj.weight" else'
        " self.encodings[matrix_kind(tensor)]",
        "encoding",
    ),
    _weights(
        "grid_clipped",
        "steps are too small by a quarter, so that the largest weights are cut",
        _LINEAR,
        "linear.py",
        '"clipping": (-highest, highest)',
        '"clipping": (-highest, highest * 1.25)',
        "a weight off its code",
    ),
    _weights(
        "grid_too_wide",
        "steps are too large by a half, so that levels stay unused",
        _LINEAR,
        "linear.py",
        '"clipping": (-highest, highest)',
        '"clipping": (-highest, highest / 1.5)',
        "a weight off its code",
    ),
    _weights(
        "one_code_off",
        "one matrix has every second code off by one",
        _INT4,
        "encode.py",
        'writer.append(f"{name}.indices", block.indices)',
        'noise = np.uint8(name == "layers.7.mlp.down_proj.weight" and encoding.bits == 4)\n'
        "        block.indices[:, ::2] ^= noise\n"
        '        writer.append(f"{name}.indices", block.indices)',
        "quality report",
        alone=True,
    ),
    _weights(
        "vectors_rounded",
        "norm weights are rounded to two decimals",
        _LINEAR,
        "writer.py",
        "    return vector\n",
        "    return np.round(vector, 2)\n",
        "vectors",
    ),
    _weights(
        "qat_steps_off",
        "steps of the checkpoint's own grid are off by one part in a thousand",
        _QAT,
        "qat_grid.py",
        "found = measured(rows, codes.reshape(rows.shape), kept)",
        "kept = (kept.astype(np.float32) * np.float32(1.001)).astype(np.float16)\n"
        "    found = measured(rows, codes.reshape(rows.shape), kept)",
        "share of weights kept to the bit",
    ),
)
