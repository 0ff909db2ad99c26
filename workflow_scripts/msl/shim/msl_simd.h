// Barriers and SIMD-group functions. All lanes of a SIMD-group must come to the same call: the runtime reports
// a call under divergence, which Metal would answer with the active lanes' values only.
#pragma once
#include "msl_math.h"
#include "msl_thread.h"

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4, mem_threadgroup_imageblock = 8 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

#define MSL_HERE const std::source_location& here = std::source_location::current()

inline void threadgroup_barrier(mem_flags flags, MSL_HERE) {
    msl::meet(msl::Scope::threadgroup, {"threadgroup_barrier", here}, flags != mem_flags::mem_none);
}
inline void simdgroup_barrier(mem_flags flags, MSL_HERE) {
    msl::meet(msl::Scope::simdgroup, {"simdgroup_barrier", here}, flags != mem_flags::mem_none);
}

template <scalar T>
uint64_t to_word(T value) {
    uint64_t word = 0;
    __builtin_memcpy(&word, &value, sizeof(T));
    return word;
}
template <scalar T>
T from_word(uint64_t word) {
    T value;
    __builtin_memcpy(&value, &word, sizeof(T));
    return value;
}
inline bool lane_exists(uint32_t lane) { return lane < msl::simd_width && (msl::self->present >> lane & 1); }

// A lane that is not there (past the SIMD-group, or of a partial one) reads as bytes of ones: NaN for floats.
MSL_UNCHECKED inline uint64_t word_of(const uint64_t* words, uint32_t lane) {
    return lane_exists(lane) ? words[lane] : ~uint64_t(0);
}

// The values of all lanes, combined pairwise as a tree. Metal leaves the order of a sum open.
template <class T, class F>
MSL_UNCHECKED T combine(const uint64_t* words, F f) {
    T values[msl::simd_width];
    uint32_t count = 0;
    for (uint32_t lane = 0; lane < msl::simd_width; lane++)
        if (lane_exists(lane)) values[count++] = from_word<T>(words[lane]);
    for (; count > 1; count = (count + 1) / 2)
        for (uint32_t i = 0; i < count / 2; i++) values[i] = f(values[i], values[count - 1 - i]);
    return values[0];
}

template <value A, class F>
auto reduce(const A& given, F f, const msl::Site& site) {
    using T = typename common<A>::element;
    return map_to<T>([&](T x) { return combine<T>(msl::exchange(to_word(x), site), f); }, given);
}

template <value A>
auto read_lane(const A& given, uint32_t lane, const msl::Site& site) {
    using T = typename common<A>::element;
    return map_to<T>([&](T x) { return from_word<T>(word_of(msl::exchange(to_word(x), site), lane)); }, given);
}

#define MSL_REDUCTION(name, expression)                                                            \
    template <value A>                                                                             \
    auto name(const A& given, MSL_HERE) {                                                          \
        using T = typename common<A>::element;                                                     \
        return reduce(given, [](T x, T y) { return T(expression); }, msl::Site(#name, here));      \
    }
MSL_REDUCTION(simd_sum, x + y) MSL_REDUCTION(simd_product, x * y)
MSL_REDUCTION(simd_max, larger<T>(x, y)) MSL_REDUCTION(simd_min, smaller<T>(x, y))
MSL_REDUCTION(simd_and, x & y) MSL_REDUCTION(simd_or, x | y) MSL_REDUCTION(simd_xor, x ^ y)
#undef MSL_REDUCTION

// The lane that simd_shuffle and simd_broadcast name must be one of the 32.
inline uint32_t named_lane(uint32_t lane, const msl::Site& site) {
    if (lane >= msl::simd_width)
        msl::fault("out of bounds", "%s (%u:%u) reads lane %u of a SIMD-group of %u", site.what, site.line, site.column,
                   lane, msl::simd_width);
    return lane;
}
inline uint32_t own_lane() { return msl::self->thread_index_in_simdgroup; }

#define MSL_SHUFFLE(name, parameter, source)                            \
    template <value A>                                                  \
    auto name(const A& given, ushort parameter, MSL_HERE) {             \
        const msl::Site site(#name, here);                              \
        return read_lane(given, source, site);                          \
    }
MSL_SHUFFLE(simd_shuffle, lane, named_lane(lane, site)) MSL_SHUFFLE(simd_broadcast, lane, named_lane(lane, site))
MSL_SHUFFLE(simd_shuffle_xor, mask, own_lane() ^ mask)
MSL_SHUFFLE(simd_shuffle_down, delta, own_lane() + delta) MSL_SHUFFLE(simd_shuffle_up, delta, own_lane() - delta)
MSL_SHUFFLE(simd_shuffle_rotate_down, delta, (own_lane() + delta) % msl::simd_width)
MSL_SHUFFLE(simd_shuffle_rotate_up, delta, (own_lane() + msl::simd_width - delta) % msl::simd_width)
#undef MSL_SHUFFLE

template <value A>
auto simd_broadcast_first(const A& given, MSL_HERE) { return read_lane(given, 0, msl::Site("simd_broadcast_first", here)); }

// Sums over the lanes before (and including) the own one, from lane 0 on.
template <class T>
MSL_UNCHECKED T prefix(const uint64_t* words, uint32_t end) {
    T sum = T(0);
    for (uint32_t lane = 0; lane < end; lane++) sum = T(sum + from_word<T>(words[lane]));
    return sum;
}
template <scalar T>
T simd_prefix_inclusive_sum(T x, MSL_HERE) {
    return prefix<T>(msl::exchange(to_word(x), msl::Site("simd_prefix_inclusive_sum", here)), own_lane() + 1);
}
template <scalar T>
T simd_prefix_exclusive_sum(T x, MSL_HERE) {
    return prefix<T>(msl::exchange(to_word(x), msl::Site("simd_prefix_exclusive_sum", here)), own_lane());
}
inline bool simd_all(bool test, MSL_HERE) {
    return reduce(test, [](bool x, bool y) { return x && y; }, msl::Site("simd_all", here));
}
inline bool simd_any(bool test, MSL_HERE) {
    return reduce(test, [](bool x, bool y) { return x || y; }, msl::Site("simd_any", here));
}
inline bool simd_is_first() { return own_lane() == 0; }

}  // namespace metal
