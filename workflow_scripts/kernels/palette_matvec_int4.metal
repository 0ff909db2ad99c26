// y = W x for one token, W [N, K] as 4-bit palette codes; K and N are multiples of 32.
//
// Tensors (axes reversed against torch: T[i, j] here is T[j, i] there)
//   X        [K, 1, 1]     half or float
//   W        [K / 8, N]    int, eight codes per word, the lowest nibble has the lowest k
//   CODEBOOK [16, N / 32]  half, one line of entries for each palette group of 32 rows
//   Y        [N, 1, 1]     the type of X
//
// Dispatch: (32, N / 4, 1) threads in groups of (32, 8, 1). A group owns one palette group: 8 SIMD-groups of 4 rows.
//
// The time goes into reading W, so every word of it is read once, in order along k. The codebook is staged once per
// group, since it is looked up for every weight, and the 4 rows of a SIMD-group share each value of X. Sums are
// float: a half sum of K = 12288 products would lose the small ones.

threadgroup float entries[16];
if (thread_index < 16) {
    entries[thread_index] = float(CODEBOOK[thread_index, group.y]);
}
threadgroup_barrier(mem_flags::mem_threadgroup);

const uint K = X.get_extent(0);
const uint row = group.y * 32 + simd_index * 4;
float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};

// A lane takes one word, 8 neighbouring values, of every 256. K is a multiple of 8: the last step is whole or absent.
for (uint k = lane * 8; k < K; k += 256) {
    const float4 low =
        float4(float(X[k, 0, 0]), float(X[k + 1, 0, 0]), float(X[k + 2, 0, 0]), float(X[k + 3, 0, 0]));
    const float4 high =
        float4(float(X[k + 4, 0, 0]), float(X[k + 5, 0, 0]), float(X[k + 6, 0, 0]), float(X[k + 7, 0, 0]));
    #pragma unroll
    for (uint r = 0; r < 4; ++r) {
        const uint w = uint(W[k / 8, row + r]);
        const float4 low_weights =
            float4(entries[w & 15], entries[(w >> 4) & 15], entries[(w >> 8) & 15], entries[(w >> 12) & 15]);
        const float4 high_weights =
            float4(entries[(w >> 16) & 15], entries[(w >> 20) & 15], entries[(w >> 24) & 15], entries[w >> 28]);
        sums[r] += dot(low, low_weights) + dot(high, high_weights);
    }
}

#pragma unroll
for (uint r = 0; r < 4; ++r) {
    const float total = simd_sum(sums[r]);
    if (lane == 0) {
        Y[row + r, 0, 0] = total;
    }
}
