// Scalar types of the language, bit casts and limits.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <limits>
#include <type_traits>

using half = _Float16;
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;

constexpr half operator""h(long double value) { return half(value); }
constexpr half operator""h(unsigned long long value) { return half(value); }

// bfloat: stored as the upper half of a float, computed as float, rounded to nearest even.
struct bfloat {
    uint16_t bits;

    bfloat() = default;
    bfloat(float value) {
        uint32_t word = __builtin_bit_cast(uint32_t, value);
        bits = value != value ? 0x7FC0 : uint16_t((word + 0x7FFF + ((word >> 16) & 1)) >> 16);
    }
    operator float() const { return __builtin_bit_cast(float, uint32_t(bits) << 16); }
};

namespace metal {

using ::bfloat;
using ::half;

template <class T>
concept scalar = std::is_arithmetic_v<T> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class T>
constexpr bool is_half_v = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <class T>
struct numeric_limits : std::numeric_limits<T> {};

template <>
struct numeric_limits<half> {
    static constexpr half max() { return half(65504.0f); }
    static constexpr half lowest() { return half(-65504.0f); }
    static constexpr half min() { return half(6.103515625e-05f); }
    static constexpr half epsilon() { return half(9.765625e-04f); }
    static constexpr half infinity() { return half(__builtin_inff()); }
    static constexpr half quiet_NaN() { return half(__builtin_nanf("")); }
};

template <class To, class From>
To as_type(const From& value) {
    static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
    To result;
    __builtin_memcpy(&result, &value, sizeof(To));
    return result;
}

}  // namespace metal

#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT 3.402823466e+38f
#define FLT_MAX 3.402823466e+38f
#define FLT_MIN 1.175494351e-38f
#define FLT_EPSILON 1.192092896e-07f
#define HALF_MAX half(65504.0f)
#define M_PI_F 3.14159265358979323846f
#define M_SQRT2_F 1.41421356237309504880f
#define M_LOG2E_F 1.44269504088896340736f
