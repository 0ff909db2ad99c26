// What the kernel's side and the runtime share: a thread's view of itself, the buffers, and the meeting points.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <source_location>

namespace msl {

constexpr uint32_t simd_width = 32;
constexpr uint32_t max_rank = 8;

struct Position {
    uint32_t x, y, z;
};

// The attribute inputs of one Metal thread, named as Metal names them.
struct Thread {
    Position thread_position_in_grid, thread_position_in_threadgroup, threadgroup_position_in_grid;
    Position threads_per_grid, threads_per_threadgroup, threadgroups_per_grid, dispatch_threads_per_threadgroup;
    uint32_t thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
    uint32_t simdgroups_per_threadgroup, dispatch_simdgroups_per_threadgroup;
    uint32_t threads_per_simdgroup, thread_execution_width;
    uint32_t present;  // bit i: lane i of this SIMD-group exists (the last group of a grid may be partial)
};

// One argument or result. `type` is numpy's kind and item size, "f2" or "u4"; the shape has torch's axis order.
struct Buffer {
    char name[128];
    char type[4];
    char* data;
    size_t bytes;
    uint32_t rank;
    int64_t shape[max_rank];
    uint32_t* accesses;  // mode `count`: how often each element was used
};

// Where in the kernel's source a thread waits.
struct Site {
    const char* what;
    uint32_t line, column;

    Site(const char* name, const std::source_location& where)
        : what(name), line(where.line()), column(where.column()) {}
    Site() : what(""), line(0), column(0) {}
    bool operator==(const Site& other) const { return line == other.line && column == other.column; }
};

enum class Scope { simdgroup, threadgroup };

extern const Thread* self;  // the running thread

// Ends the program with one line about what went wrong, with the running thread's place in the grid added.
[[noreturn]] void fault(const char* kind, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Wait until every thread of the scope has come to the same site. `orders_memory`: what was written before is
// visible behind it.
void meet(Scope scope, const Site& site, bool orders_memory);

// Give a value to the SIMD-group and wait for the others; returns the values by lane, valid until the thread's
// next but one exchange. No memory is ordered by it, as in Metal.
const uint64_t* exchange(uint64_t word, const Site& site);

// The generated launcher: one Metal thread from its start to its end.
void run_thread(const Buffer* buffers);

}  // namespace msl

// Memory that the runtime hands around behind the sanitizers' backs.
#if defined(MSL_ADDRESS) || defined(MSL_THREAD)
#define MSL_UNCHECKED __attribute__((no_sanitize("address", "thread", "undefined"), noinline))
#else
#define MSL_UNCHECKED
#endif
