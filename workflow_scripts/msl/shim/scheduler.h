// Runs one threadgroup after the other: a fiber per thread, SIMD-groups in turn up to the next barrier.
#pragma once
#include <algorithm>
#include <numeric>
#include <vector>

#include "fibers.h"
#include "plan.h"

namespace msl {

enum class State { running, in_simdgroup, in_threadgroup, ended };

struct Lane {
    Thread thread{};
    Fiber fiber;
    State state = State::ended;
    Site site;
    unsigned exchanges = 0;   // both counts: which of the two alternating places is next
    unsigned barriers = 0;
};

struct SimdGroup {
    std::vector<Lane*> order;             // the schedule
    uint64_t words[2][simd_width] = {};   // what the lanes exchange; alternating, so no lane overwrites unread words
    char barrier[2] = {};                 // addresses for TSan
};

extern Lane* current;

#if defined(__APPLE__)
extern char storage_begin[] __asm("section$start$__DATA$msltg");
extern char storage_end[] __asm("section$end$__DATA$msltg");
#else
extern "C" char __start_msltg[], __stop_msltg[];
inline char* const storage_begin = __start_msltg;
inline char* const storage_end = __stop_msltg;
#endif

// The order of memory that barriers, and the begin and end of a threadgroup, give; for TSan. Each sync point has an
// address of its own and barriers alternate between two: with a single one, a thread that is early at the next
// barrier would count as ordered before a late one of this barrier, and a write-after-read race would go unseen.
inline void release_memory([[maybe_unused]] char& at) {
#if defined(MSL_THREAD)
    __tsan_release(&at);
#endif
}
inline void acquire_memory([[maybe_unused]] char& at) {
#if defined(MSL_THREAD)
    __tsan_acquire(&at);
#endif
}

inline uint64_t mix(uint64_t x) {  // splitmix64
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// Order 0: as numbered, 1: reversed, from 2 on: shuffled by that seed.
template <class T>
void arrange(std::vector<T>& items, unsigned order, uint64_t salt) {
    if (order == 1) std::reverse(items.begin(), items.end());
    if (order < 2) return;
    uint64_t state = mix(order * 0x10001u + salt);
    for (size_t i = items.size(); i > 1; i--) std::swap(items[i - 1], items[(state = mix(state)) % i]);
}

class Scheduler {
   public:
    explicit Scheduler(const Plan& plan);
    void run_group(uint64_t number);                    // a threadgroup, by its linear index
    uint64_t groups() const { return uint64_t(grid_.x) * grid_.y * grid_.z; }
    void leave(State state);                            // from a lane: let the others go on
    char start_sync = 0, end_sync = 0, barrier_sync[2] = {};
    SimdGroup& simd_of(const Lane& lane) { return simd_[lane.thread.simdgroup_index_in_threadgroup]; }
    void enter();                                       // from a new lane
    const char* place(char* text, size_t room) const;   // where the running lane is

   private:
    void place_lanes(Position group, uint64_t number);
    void fill_storage();
    void run_simdgroup(SimdGroup& simd);
    void check_threadgroup();

    const Plan& plan_;
    Position grid_;  // threadgroups
    std::vector<Lane> lanes_;
    std::vector<SimdGroup> simd_;
    std::vector<SimdGroup*> order_;
    size_t present_ = 0;  // lanes of this threadgroup
    Fiber main_;
};

}  // namespace msl
