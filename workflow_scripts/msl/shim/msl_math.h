// Maths and relational functions, on scalars and element-wise on vectors. All are templates: a C library that
// declares exp(float) globally is then no ambiguity under `using namespace metal`. half is computed as float.
#pragma once
#include "msl_vec.h"

namespace metal {

// A float function on the element type E.
#define MSL_FLOAT_1(name, expression)                                                           \
    template <value A>                                                                          \
    auto name(const A& a) {                                                                     \
        using E = typename common<A>::element;                                                  \
        return map_to<E>([](E given) { const float x = float(given); return expression; }, a);  \
    }
MSL_FLOAT_1(sqrt, __builtin_sqrtf(x)) MSL_FLOAT_1(rsqrt, 1.0f / __builtin_sqrtf(x))
MSL_FLOAT_1(exp, __builtin_expf(x)) MSL_FLOAT_1(exp2, __builtin_exp2f(x))
MSL_FLOAT_1(exp10, __builtin_powf(10.0f, x)) MSL_FLOAT_1(log, __builtin_logf(x))
MSL_FLOAT_1(log2, __builtin_log2f(x)) MSL_FLOAT_1(log10, __builtin_log10f(x))
MSL_FLOAT_1(sin, __builtin_sinf(x)) MSL_FLOAT_1(cos, __builtin_cosf(x)) MSL_FLOAT_1(tan, __builtin_tanf(x))
MSL_FLOAT_1(asin, __builtin_asinf(x)) MSL_FLOAT_1(acos, __builtin_acosf(x)) MSL_FLOAT_1(atan, __builtin_atanf(x))
MSL_FLOAT_1(sinh, __builtin_sinhf(x)) MSL_FLOAT_1(cosh, __builtin_coshf(x)) MSL_FLOAT_1(tanh, __builtin_tanhf(x))
MSL_FLOAT_1(fabs, __builtin_fabsf(x)) MSL_FLOAT_1(floor, __builtin_floorf(x)) MSL_FLOAT_1(ceil, __builtin_ceilf(x))
MSL_FLOAT_1(trunc, __builtin_truncf(x)) MSL_FLOAT_1(round, __builtin_roundf(x))
MSL_FLOAT_1(rint, __builtin_rintf(x)) MSL_FLOAT_1(fract, x - __builtin_floorf(x))
MSL_FLOAT_1(saturate, x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f)
MSL_FLOAT_1(sign, x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : 0.0f)
#undef MSL_FLOAT_1

#define MSL_FLOAT_2(name, expression)                                                                           \
    template <value A, value B>                                                                                 \
    auto name(const A& a, const B& b) {                                                                         \
        using E = typename common<A, B>::element;                                                               \
        return map_to<E>([](E s, E t) { const float x = float(s), y = float(t); return expression; }, a, b);    \
    }
MSL_FLOAT_2(fmin, __builtin_fminf(x, y)) MSL_FLOAT_2(fmax, __builtin_fmaxf(x, y))
MSL_FLOAT_2(pow, __builtin_powf(x, y)) MSL_FLOAT_2(powr, __builtin_powf(x, y))
MSL_FLOAT_2(fmod, __builtin_fmodf(x, y)) MSL_FLOAT_2(atan2, __builtin_atan2f(x, y))
MSL_FLOAT_2(copysign, __builtin_copysignf(x, y)) MSL_FLOAT_2(step, y < x ? 0.0f : 1.0f)
#undef MSL_FLOAT_2

#define MSL_FLOAT_3(name, expression)                                                                     \
    template <value A, value B, value C>                                                                  \
    auto name(const A& a, const B& b, const C& c) {                                                       \
        using E = typename common<A, B, C>::element;                                                      \
        return map_to<E>(                                                                                 \
            [](E s, E t, E u) {                                                                           \
                const float x = float(s), y = float(t), z = float(u);                                     \
                return expression;                                                                        \
            },                                                                                            \
            a, b, c);                                                                                     \
    }
inline float smooth(float t) { return t * t * (3.0f - 2.0f * t); }
inline float unit(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }
MSL_FLOAT_3(fma, __builtin_fmaf(x, y, z)) MSL_FLOAT_3(mix, x + (y - x) * z)
MSL_FLOAT_3(smoothstep, smooth(unit((z - x) / (y - x))))
#undef MSL_FLOAT_3

// Any element type. min and max of floats return the other operand for a NaN, as Metal's precise versions do.
template <class E>
E smaller(E x, E y) {
    if constexpr (std::is_integral_v<E>) return y < x ? y : x;
    else return E(__builtin_fminf(float(x), float(y)));
}
template <class E>
E larger(E x, E y) {
    if constexpr (std::is_integral_v<E>) return x < y ? y : x;
    else return E(__builtin_fmaxf(float(x), float(y)));
}
template <value A, value B>
auto min(const A& a, const B& b) {
    using E = typename common<A, B>::element;
    return map_to<E>([](E x, E y) { return smaller<E>(x, y); }, a, b);
}
template <value A, value B>
auto max(const A& a, const B& b) {
    using E = typename common<A, B>::element;
    return map_to<E>([](E x, E y) { return larger<E>(x, y); }, a, b);
}
template <value A, value B, value C>
auto clamp(const A& a, const B& low, const C& high) { return min(max(a, low), high); }
template <value A, value B, value C>
auto mad(const A& a, const B& b, const C& c) { return a * b + c; }
template <value A>
auto abs(const A& a) {
    using E = typename common<A>::element;
    return map_to<E>([](E x) { return x < E(0) ? E(-x) : x == E(0) ? E(0) : x; }, a);
}

#define MSL_TEST(name, expression)                                                                \
    template <value A>                                                                            \
    auto name(const A& a) {                                                                       \
        using E = typename common<A>::element;                                                    \
        return map_to<bool>([](E given) { const float x = float(given); return expression; }, a); \
    }
MSL_TEST(isnan, __builtin_isnan(x)) MSL_TEST(isinf, __builtin_isinf(x)) MSL_TEST(isfinite, __builtin_isfinite(x))
#undef MSL_TEST

#define MSL_BITS(name, expression)                                                                              \
    template <value A>                                                                                          \
    auto name(const A& a) {                                                                                     \
        using E = typename common<A>::element;                                                                  \
        return map_to<E>([](E given) {                                                                          \
            const auto x = std::make_unsigned_t<E>(given);                                                      \
            [[maybe_unused]] constexpr int width = 8 * sizeof(E);                                               \
            return expression;                                                                                  \
        }, a);                                                                                                  \
    }
MSL_BITS(popcount, __builtin_popcountll(x))
MSL_BITS(clz, x ? __builtin_clzll(x) - (64 - width) : width)
MSL_BITS(ctz, x ? __builtin_ctzll(x) : width)
#undef MSL_BITS

// select(a, b, c): b where c, else a.
template <scalar T, class C>
    requires(!vector<C>)
T select(T a, T b, C c) { return c ? b : a; }
template <vector A, vector B, vector C>
auto select(const A& a, const B& b, const C& c) {
    plain_t<A> result = a;
    for (int i = 0; i < size_v<A>; i++)
        if (plain(c).elements[i]) result.elements[i] = plain(b).elements[i];
    return result;
}

template <vector A>
bool any(const A& a) {
    for (int i = 0; i < size_v<A>; i++) if (plain(a).elements[i]) return true;
    return false;
}
template <vector A>
bool all(const A& a) {
    for (int i = 0; i < size_v<A>; i++) if (!plain(a).elements[i]) return false;
    return true;
}
template <vector A, vector B>
auto dot(const A& a, const B& b) {
    const auto products = a * b;
    auto sum = products.elements[0];
    for (int i = 1; i < size_v<A>; i++) sum = decltype(sum)(sum + products.elements[i]);
    return sum;
}
template <vector A>
auto length_squared(const A& a) { return dot(a, a); }
template <vector A>
auto length(const A& a) { return sqrt(dot(a, a)); }
template <vector A, vector B>
auto distance(const A& a, const B& b) { return length(a - b); }
template <vector A>
auto normalize(const A& a) { return a * rsqrt(dot(a, a)); }
template <vector A, vector B>
auto cross(const A& a, const B& b) {
    const auto p = plain(a), q = plain(b);
    return plain_t<A>(p.y * q.z - p.z * q.y, p.z * q.x - p.x * q.z, p.x * q.y - p.y * q.x);
}

namespace precise { using namespace metal; }
namespace fast { using namespace metal; }

}  // namespace metal
