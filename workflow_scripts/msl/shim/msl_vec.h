// vec<T, N> with element names, swizzles (readable and writable) and element-wise operators.
// A struct and no compiler extension: clang's ext_vector_type rejects float4(a, b, c, d) outside of Metal.
#pragma once
#include "msl_scalar.h"

namespace metal {

template <class T, int N>
struct vec;

// Some elements of a vector under one name; lies in a union over the vector's M elements.
template <class T, int M, int... I>
struct swizzle {
    using whole = vec<T, int(sizeof...(I))>;
    T elements[M];

    operator whole() const { return whole(elements[I]...); }
    swizzle& operator=(const whole& value) {
        int from = 0;
        ((elements[I] = value.elements[from++]), ...);
        return *this;
    }
    swizzle& operator=(const swizzle& other) { return *this = whole(other); }
    template <class A> swizzle& operator+=(const A& a) { return *this = whole(*this) + a; }
    template <class A> swizzle& operator-=(const A& a) { return *this = whole(*this) - a; }
    template <class A> swizzle& operator*=(const A& a) { return *this = whole(*this) * a; }
    template <class A> swizzle& operator/=(const A& a) { return *this = whole(*this) / a; }
};

// plain(x): a swizzle as the vector it stands for, anything else as it is.
template <scalar T>
T plain(T value) { return value; }
template <class T, int N>
const vec<T, N>& plain(const vec<T, N>& value) { return value; }
template <class T, int M, int... I>
vec<T, int(sizeof...(I))> plain(const swizzle<T, M, I...>& value) { return value; }

template <class A>
using plain_t = std::remove_cvref_t<decltype(plain(std::declval<const A&>()))>;

template <class A>
struct traits {
    static constexpr int size = 1;
    using element = A;
};
template <class T, int N>
struct traits<vec<T, N>> {
    static constexpr int size = N;
    using element = T;
};
template <class A>
constexpr int size_v = traits<plain_t<A>>::size;
template <class A>
concept vector = requires { typename plain_t<A>; } && (size_v<A> > 1);
template <class A>
concept value = requires { typename plain_t<A>; };

template <class A>
auto element(const A& a, int i) {
    if constexpr (traits<A>::size == 1) return a;
    else return a.elements[i];
}

// The elements of all constructor arguments, one after the other.
template <class T, int N, class... A>
void fill_elements(T (&elements)[N], const A&... arguments) {
    int to = 0;
    auto append = [&](const auto& a) {
        for (int i = 0; i < traits<std::remove_cvref_t<decltype(a)>>::size; i++) elements[to++] = T(element(a, i));
    };
    (append(plain(arguments)), ...);
}

#define MSL_VEC_BODY(N)                                                                                      \
    vec() = default;                                                                                         \
    vec(const vec&) = default;                                                                               \
    vec& operator=(const vec& other) {                                                                       \
        for (int i = 0; i < N; i++) elements[i] = other.elements[i];                                         \
        return *this;                                                                                        \
    }                                                                                                        \
    template <scalar S>                                                                                      \
    vec(S value) { for (int i = 0; i < N; i++) elements[i] = T(value); }                                     \
    template <class U>                                                                                       \
    explicit vec(const vec<U, N>& other) { for (int i = 0; i < N; i++) elements[i] = T(other.elements[i]); } \
    template <class U, int M, int... I>                                                                      \
        requires(sizeof...(I) == N && !std::is_same_v<U, T>)                                                 \
    explicit vec(const swizzle<U, M, I...>& other) : vec(plain(other)) {}                                    \
    template <value... A>                                                                                    \
        requires(sizeof...(A) > 1 && (0 + ... + size_v<A>) == N)                                             \
    vec(const A&... arguments) { fill_elements(elements, arguments...); }                                    \
    T& operator[](size_t i) { return elements[i]; }                                                          \
    const T& operator[](size_t i) const { return elements[i]; }                                              \
    template <class A> vec& operator+=(const A& a) { return *this = *this + a; }                             \
    template <class A> vec& operator-=(const A& a) { return *this = *this - a; }                             \
    template <class A> vec& operator*=(const A& a) { return *this = *this * a; }                             \
    template <class A> vec& operator/=(const A& a) { return *this = *this / a; }                             \
    template <class A> vec& operator%=(const A& a) { return *this = *this % a; }                             \
    template <class A> vec& operator&=(const A& a) { return *this = *this & a; }                             \
    template <class A> vec& operator|=(const A& a) { return *this = *this | a; }                             \
    template <class A> vec& operator^=(const A& a) { return *this = *this ^ a; }                             \
    template <class A> vec& operator<<=(const A& a) { return *this = *this << a; }                           \
    template <class A> vec& operator>>=(const A& a) { return *this = *this >> a; }

// All swizzles of two to four letters over M elements. One EACH macro per depth, since a macro cannot recurse.
#define MSL_2(E1, E2, M) E1(MSL_2A, E2, M)
#define MSL_2A(a, i, E2, M) E2(MSL_2B, a, i, M)
#define MSL_2B(b, j, a, i, M) swizzle<T, M, i, j> a##b;
#define MSL_3(E1, E2, E3, M) E1(MSL_3A, E2, E3, M)
#define MSL_3A(a, i, E2, E3, M) E2(MSL_3B, a, i, E3, M)
#define MSL_3B(b, j, a, i, E3, M) E3(MSL_3C, b, j, a, i, M)
#define MSL_3C(c, k, b, j, a, i, M) swizzle<T, M, i, j, k> a##b##c;
#define MSL_4(E1, E2, E3, E4, M) E1(MSL_4A, E2, E3, E4, M)
#define MSL_4A(a, i, E2, E3, E4, M) E2(MSL_4B, a, i, E3, E4, M)
#define MSL_4B(b, j, a, i, E3, E4, M) E3(MSL_4C, b, j, a, i, E4, M)
#define MSL_4C(c, k, b, j, a, i, E4, M) E4(MSL_4D, c, k, b, j, a, i, M)
#define MSL_4D(d, l, c, k, b, j, a, i, M) swizzle<T, M, i, j, k, l> a##b##c##d;
#define MSL_XY1(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__)
#define MSL_XY2(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__)
#define MSL_XY3(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__)
#define MSL_XY4(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__)
#define MSL_XYZ1(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__)
#define MSL_XYZ2(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__)
#define MSL_XYZ3(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__)
#define MSL_XYZ4(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__)
#define MSL_XYZW1(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__) F(w, 3, __VA_ARGS__)
#define MSL_XYZW2(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__) F(w, 3, __VA_ARGS__)
#define MSL_XYZW3(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__) F(w, 3, __VA_ARGS__)
#define MSL_XYZW4(F, ...) F(x, 0, __VA_ARGS__) F(y, 1, __VA_ARGS__) F(z, 2, __VA_ARGS__) F(w, 3, __VA_ARGS__)
#define MSL_SWIZZLES(E, M) MSL_2(E##1, E##2, M) MSL_3(E##1, E##2, E##3, M) MSL_4(E##1, E##2, E##3, E##4, M)

template <class T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
    union {
        T elements[2];
        struct { T x, y; };
        struct { T r, g; };
        MSL_SWIZZLES(MSL_XY, 2)
        swizzle<T, 2, 0, 1> rg;
    };
    MSL_VEC_BODY(2)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 3> {  // as large as four elements, as in Metal
    union {
        T elements[3];
        struct { T x, y, z; };
        struct { T r, g, b; };
        MSL_SWIZZLES(MSL_XYZ, 3)
        swizzle<T, 3, 0, 1> rg;
        swizzle<T, 3, 0, 1, 2> rgb;
    };
    MSL_VEC_BODY(3)
};

template <class T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
    union {
        T elements[4];
        struct { T x, y, z, w; };
        struct { T r, g, b, a; };
        MSL_SWIZZLES(MSL_XYZW, 4)
        swizzle<T, 4, 0, 1> rg;
        swizzle<T, 4, 0, 1, 2> rgb;
        swizzle<T, 4, 0, 1, 2, 3> rgba;
    };
    MSL_VEC_BODY(4)
};

// Element type of an operation on vectors and scalars: that of the (first) vector.
template <class A, class... B>
struct common {
    using element = typename traits<plain_t<A>>::element;
    static constexpr int size = size_v<A>;
};
template <class A, class... B>
    requires(sizeof...(B) > 0 && size_v<A> == 1 && (vector<B> || ...))
struct common<A, B...> : common<B...> {};

template <class T, int N>
struct vec_or_scalar { using type = vec<T, N>; };
template <class T>
struct vec_or_scalar<T, 1> { using type = T; };

// f over the elements of vectors of one size; scalars among the arguments count for every element.
template <class T, class F, class... A>
auto map_to(F f, const A&... arguments) {
    constexpr int n = common<A...>::size;
    using E = typename common<A...>::element;
    static_assert(((size_v<A> == 1 || size_v<A> == n) && ...), "vectors of different sizes");
    if constexpr (n == 1) {
        return T(f(E(arguments)...));
    } else {
        vec<T, n> result;
        for (int i = 0; i < n; i++) result.elements[i] = T(f(E(element(plain(arguments), i))...));
        return result;
    }
}

#define MSL_OPERATOR(op, result)                                       \
    template <value A, value B>                                        \
        requires(vector<A> || vector<B>)                               \
    auto operator op(const A& a, const B& b) {                         \
        using E = typename common<A, B>::element;                      \
        return map_to<result>([](E x, E y) { return x op y; }, a, b);  \
    }
MSL_OPERATOR(+, E) MSL_OPERATOR(-, E) MSL_OPERATOR(*, E) MSL_OPERATOR(/, E) MSL_OPERATOR(%, E)
MSL_OPERATOR(&, E) MSL_OPERATOR(|, E) MSL_OPERATOR(^, E) MSL_OPERATOR(<<, E) MSL_OPERATOR(>>, E)
MSL_OPERATOR(==, bool) MSL_OPERATOR(!=, bool) MSL_OPERATOR(<, bool) MSL_OPERATOR(>, bool)
MSL_OPERATOR(<=, bool) MSL_OPERATOR(>=, bool) MSL_OPERATOR(&&, bool) MSL_OPERATOR(||, bool)
#undef MSL_OPERATOR

template <vector A>
auto operator-(const A& a) { return map_to<typename common<A>::element>([](auto x) { return -x; }, a); }
template <vector A>
auto operator~(const A& a) { return map_to<typename common<A>::element>([](auto x) { return ~x; }, a); }
template <vector A>
auto operator!(const A& a) { return map_to<bool>([](auto x) { return !x; }, a); }

}  // namespace metal

#define MSL_NAMES(T)              \
    using T##2 = metal::vec<T, 2>; \
    using T##3 = metal::vec<T, 3>; \
    using T##4 = metal::vec<T, 4>;
MSL_NAMES(bool) MSL_NAMES(char) MSL_NAMES(uchar) MSL_NAMES(short) MSL_NAMES(ushort) MSL_NAMES(int)
MSL_NAMES(uint) MSL_NAMES(long) MSL_NAMES(ulong) MSL_NAMES(half) MSL_NAMES(float) MSL_NAMES(bfloat)
#undef MSL_NAMES
