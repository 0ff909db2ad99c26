// From buffers and attribute values to a kernel's typed parameters. The types come from the kernel itself.
#pragma once
#include "msl_tensor.h"
#include "msl_vec.h"

namespace msl {

template <class T>
struct is_tensor : std::false_type {};
template <class T, class E, class H>
struct is_tensor<metal::tensor<T, E, H>> : std::true_type {};

// numpy's kind and item size of an element type.
template <class T>
const char* type_name() {
    using U = std::remove_cv_t<T>;
    static char name[3] = {
        std::is_same_v<U, bool> ? 'b' : std::is_same_v<U, bfloat> ? 'V' : std::is_same_v<U, half> ? 'f'
        : std::is_floating_point_v<U> ? 'f' : std::is_signed_v<U> ? 'i' : 'u',
        char('0' + sizeof(U)), 0};
    return name;
}

template <class T>
void check_type(const Buffer& buffer, uint32_t rank) {
    const char* wanted = type_name<T>();
    const bool widened = std::is_same_v<T, bool> && !__builtin_strcmp(buffer.type, "u1");  // how Core AI stores it
    if ((__builtin_strcmp(wanted, buffer.type) != 0 && !widened) || buffer.rank != rank)
        fault("argument", "%s is given as %s with %u axes, the kernel takes %s with %u", buffer.name, buffer.type,
              buffer.rank, wanted, rank);
}

template <class P>
P as(const Buffer& buffer) {
    using T = std::remove_cvref_t<P>;
    if constexpr (is_tensor<T>::value) {
        check_type<typename T::value_type>(buffer, T::rank);
        return T(buffer);
    } else if constexpr (std::is_pointer_v<T>) {
        return reinterpret_cast<T>(buffer.data);
    } else {
        check_type<T>(buffer, 0);
        return *reinterpret_cast<const T*>(buffer.data);
    }
}

template <class P>
P as(const Position& position) {
    using T = std::remove_cvref_t<P>;
    if constexpr (metal::traits<T>::size == 3) return T(position.x, position.y, position.z);
    else if constexpr (metal::traits<T>::size == 2) return T(position.x, position.y);
    else return T(position.x);
}

template <class P>
P as(const uint32_t& number) { return P(number); }

template <class... P, class... S>
void call(void (*kernel)(P...), const S&... sources) {
    static_assert(sizeof...(P) == sizeof...(S), "one source for each of the kernel's parameters");
    kernel(as<P>(sources)...);
}

}  // namespace msl
