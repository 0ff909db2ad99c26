"""Faults of the Metal kernels and of what calls them. On this host no kernel runs in a bundle: the gate runs them."""

from workflow_scripts.checks.mutant_catalogue.mutant import Mutant, edited

CORE_INT8, CORE_INT4 = "gemma4_tiny_metal_int8v3_L10.aimodel", "gemma4_tiny_metal_int4km_L10.aimodel"
HEAD_INT8, HEAD_INT4 = "gemma4_tiny_head_argmax_kernel.aimodel", "gemma4_tiny_head_argmax_int4km.aimodel"


def _kernel(
    name: str, fault: str, target: str, file: str, old: str, new: str, check: str = "", alone: bool = False
) -> Mutant:
    return edited(name, fault, "kernels", target, f"kernels/{file}", old, new, check, alone)


MUTANTS = (
    _kernel(
        "nibbles_swapped",
        "the kernel takes the high nibble of a byte first",
        CORE_INT4,
        "palette_matvec_int4.metal",
        "float4(entries[w & 15], entries[(w >> 4) & 15], ",
        "float4(entries[(w >> 4) & 15], entries[w & 15], ",
        "palette_matvec_int4",
    ),
    _kernel(
        "packed_high_first",
        "codes are packed with the first one in the high nibble",
        CORE_INT4,
        "packing.py",
        "indices[:, 0::2] | indices[:, 1::2] << 4",
        "indices[:, 1::2] | indices[:, 0::2] << 4",
        "palette_matvec_int4",
    ),
    _kernel(
        "codebook_of_a_neighbour",
        "a threadgroup takes the codebook of the group beside it",
        CORE_INT8,
        "palette_matvec_int8.metal",
        "entries[thread_index] = float(CODEBOOK[thread_index, group.y]);",
        "entries[thread_index] = float(CODEBOOK[thread_index, group.y ^ 1]);",
        "palette_matvec_int8",
    ),
    _kernel(
        "tail_left_out",
        "the last columns are left out where they fill no whole step",
        HEAD_INT8,
        "head_argmax_int8.metal",
        "for (uint k = lane * 8; k < K; k += 256)",
        "for (uint k = lane * 8; k - lane * 8 + 256 <= K; k += 256)",
        "head_argmax_int8",
    ),
    _kernel(
        "barrier_missing",
        "the codebook is read before all threads have staged it",
        HEAD_INT8,
        "head_argmax_int8.metal",
        "threadgroup_barrier(mem_flags::mem_threadgroup);",
        "",
        "race",
    ),
    _kernel(
        "read_beyond",
        "the second word of a step is read one too far: beyond the row, at its end",
        CORE_INT8,
        "palette_matvec_int8.metal",
        "W[k / 4 + 1, row + r]",
        "W[k / 4 + 2, row + r]",
        "palette_matvec_int8",
    ),
    _kernel(
        "highest_of_equals",
        "of equal scores the highest row of a tile is taken",
        HEAD_INT8,
        "head_argmax_int8.metal",
        "if (score > best) {",
        "if (score >= best) {",
        "the lowest row of the largest score",
        alone=True,
    ),
    _kernel(
        "half_sums",
        "the kernel sums in float16",
        CORE_INT4,
        "palette_matvec_int4.metal",
        "float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};",
        "half sums[4] = {0.0h, 0.0h, 0.0h, 0.0h};",
        "palette_matvec_int4",
    ),
    _kernel(
        "lanes_overlap",
        "lanes start 4 values apart, not 8",
        HEAD_INT4,
        "head_argmax_int4.metal",
        "for (uint k = lane * 8; k < K; k += 256)",
        "for (uint k = lane * 4; k < K; k += 256)",
        "head_argmax_int4",
    ),
    _kernel(
        "half_the_grid",
        "the binding dispatches half of the rows",
        CORE_INT8,
        "binding.py",
        "threads_per_grid=(_LANES, rows // _MATVEC_ROWS, 1)",
        "threads_per_grid=(_LANES, rows // _MATVEC_ROWS // 2, 1)",
        "types, shapes and dispatch",
    ),
    _kernel(
        "another_matrix",
        "up_proj reads the words of gate_proj",
        CORE_INT8,
        "binding.py",
        "packed_matrix(weights, name, bits, scratch))\n",
        'packed_matrix(weights, name.replace("up_proj", "gate_proj"), bits, scratch))\n',
        "words and codebooks",
    ),
)
