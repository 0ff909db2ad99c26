// The best row of every tile of 8: scores = W x over the tied embedding W [N, K] as 4-bit palette codes.
// K and N are multiples of 32. The softcap is monotonic and changes no choice, so there is none.
//
// Tensors (axes reversed against torch: T[i, j] here is T[j, i] there)
//   X               [K, 1, 1]     half or float
//   W               [K / 8, N]    int, eight codes per word, the lowest nibble has the lowest k
//   CODEBOOK        [16, N / 32]  half, one line of entries for each palette group of 32 rows
//   PARTIAL_VALUES  [N / 8]       float, the largest score of the tile
//   PARTIAL_INDICES [N / 8]       int, its row, the lowest one among equal scores
//
// Dispatch: (32, N / 8, 1) threads in groups of (32, 4, 1). A group owns one palette group: 4 SIMD-groups of one tile.
// A SIMD-group holds its whole tile, so choosing needs no second barrier, and each value of X serves 8 rows.
// Every word of W is read once, in order along k; sums are float.

threadgroup float entries[16];
if (thread_index < 16) {
    entries[thread_index] = float(CODEBOOK[thread_index, group.y]);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const uint K = X.get_extent(0);
const uint tile = group.y * 4 + simd_index;
const uint row = tile * 8;
float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};

// A lane takes one word, 8 neighbouring values, of every 256. K is a multiple of 8: the last step is whole or absent.
for (uint k = lane * 8; k < K; k += 256) {
    const float4 low =
        float4(float(X[k, 0, 0]), float(X[k + 1, 0, 0]), float(X[k + 2, 0, 0]), float(X[k + 3, 0, 0]));
    const float4 high =
        float4(float(X[k + 4, 0, 0]), float(X[k + 5, 0, 0]), float(X[k + 6, 0, 0]), float(X[k + 7, 0, 0]));
    #pragma unroll
    for (uint r = 0; r < 8; ++r) {
        const uint w = uint(W[k / 8, row + r]);
        const float4 low_weights =
            float4(entries[w & 15], entries[(w >> 4) & 15], entries[(w >> 8) & 15], entries[(w >> 12) & 15]);
        const float4 high_weights =
            float4(entries[(w >> 16) & 15], entries[(w >> 20) & 15], entries[(w >> 24) & 15], entries[w >> 28]);
        sums[r] += dot(low, low_weights) + dot(high, high_weights);
    }
}

// Row 0 starts, not minus infinity: fast maths may assume that infinities do not occur. Strictly greater keeps the
// lowest row; equal rows have equal sums, since every row is added up in the same order.
float best = simd_sum(sums[0]);
uint place = 0;
#pragma unroll
for (uint r = 1; r < 8; ++r) {
    const float score = simd_sum(sums[r]);
    if (score > best) {
        best = score;
        place = r;
    }
}
if (lane == 0) {
    PARTIAL_VALUES[tile] = best;
    PARTIAL_INDICES[tile] = int(row + place);
}
