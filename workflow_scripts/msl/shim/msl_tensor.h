// tensor<device T, dextents<int, N>, tensor_handle>: axis 0 is the fastest, so its axes are torch's in reverse.
#pragma once
#include "msl_scalar.h"
#include "msl_thread.h"

namespace metal {

template <class Index, int N>
struct dextents {
    using index_type = Index;
    static constexpr int rank = N;
};
struct tensor_handle {};

template <class T, class Extents, class Handle = tensor_handle>
class tensor {
   public:
    using value_type = T;
    static constexpr int rank = Extents::rank;

    explicit tensor(const msl::Buffer& buffer) : data_(reinterpret_cast<T*>(buffer.data)), name_(buffer.name) {
        for (int axis = 0; axis < rank; axis++) extent_[axis] = buffer.shape[rank - 1 - axis];
    }

    template <class... I>
    T& operator[](I... index) const {
        static_assert(sizeof...(I) == rank, "a tensor takes one index per axis");
        const int64_t at[rank] = {int64_t(index)...};
        int64_t offset = 0;
        for (int axis = rank - 1; axis >= 0; axis--) {
            if (uint64_t(at[axis]) >= uint64_t(extent_[axis])) [[unlikely]] outside(at, axis);
            offset = offset * extent_[axis] + at[axis];
        }
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
    [[noreturn, gnu::noinline, gnu::cold]] void outside(const int64_t* at, int axis) const {
        char indices[24 * rank + 1];
        for (int i = 0, used = 0; i < rank; i++)
            used += __builtin_snprintf(indices + used, sizeof(indices) - size_t(used), i ? ", %lld" : "%lld",
                                       static_cast<long long>(at[i]));
        msl::fault("out of bounds", "%s[%s]: axis %d (of the kernel's order) has %lld elements", name_, indices, axis,
                   static_cast<long long>(extent_[axis]));
    }

    T* data_;
    const char* name_;
    int64_t extent_[rank];
};

}  // namespace metal
