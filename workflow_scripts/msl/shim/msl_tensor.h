// tensor<device T, dextents<int, N>, tensor_handle>: axis 0 is the fastest, so its axes are torch's in reverse.
#pragma once
#include "msl_scalar.h"
#include "msl_thread.h"

#include <utility>

namespace msl {

// An index and the line it is written on: the default argument is taken where a plain number becomes an index.
template <size_t Axis>
struct Index {
    int64_t value;
    uint32_t line;

    template <class I>
    Index(I index, const std::source_location& where = std::source_location::current())
        : value(int64_t(index)), line(where.line()) {}
};

}  // namespace msl

namespace metal {

template <class Index, int N>
struct dextents {
    using index_type = Index;
    static constexpr int rank = N;
};
struct tensor_handle {};

template <class T, class Extents, class Handle = tensor_handle, class Axes = std::make_index_sequence<Extents::rank>>
class tensor;

template <class T, class Extents, class Handle, size_t... Axis>
class tensor<T, Extents, Handle, std::index_sequence<Axis...>> {
   public:
    using value_type = T;
    static constexpr int rank = Extents::rank;

    explicit tensor(const msl::Buffer& buffer) : data_(reinterpret_cast<T*>(buffer.data)), name_(buffer.name), accesses_(buffer.accesses) {
        for (int axis = 0; axis < rank; axis++) extent_[axis] = buffer.shape[rank - 1 - axis];
    }

    // One index per axis.
    T& operator[](msl::Index<Axis>... index) const {
        const int64_t at[rank] = {index.value...};
        const uint32_t lines[rank] = {index.line...};
        int64_t offset = 0;
        for (int axis = rank - 1; axis >= 0; axis--) {
            if (uint64_t(at[axis]) >= uint64_t(extent_[axis])) [[unlikely]] outside(at, axis, lines[axis]);
            offset = offset * extent_[axis] + at[axis];
        }
#if defined(MSL_COUNT)
        ++accesses_[offset];
#endif
        return data_[offset];
    }

    int get_extent(size_t axis) const { return int(extent_[axis]); }
    size_t get_stride(size_t axis) const {
        size_t stride = 1;
        for (size_t faster = 0; faster < axis; faster++) stride *= size_t(extent_[faster]);
        return stride;
    }
    static constexpr size_t get_rank() { return rank; }

   private:
    [[noreturn, gnu::noinline, gnu::cold]] void outside(const int64_t* at, int axis, uint32_t line) const {
        char indices[24 * rank + 1];
        for (int i = 0, used = 0; i < rank; i++)
            used += __builtin_snprintf(indices + used, sizeof(indices) - size_t(used), i ? ", %lld" : "%lld",
                                       static_cast<long long>(at[i]));
        msl::fault("out of bounds", "%s[%s] at line %u: axis %d (of the kernel's order) has %lld elements", name_,
                   indices, line, axis, static_cast<long long>(extent_[axis]));
    }

    T* data_;
    const char* name_;
    uint32_t* accesses_;
    int64_t extent_[rank];
};

}  // namespace metal
