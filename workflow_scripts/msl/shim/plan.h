// The run as the caller wrote it, one fact a line: `key values...`, or for a buffer
// `argument NAME TYPE OFFSET BYTES RANK SHAPE... PATH`. Buffers are mapped from, and into, their files.
#pragma once
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "msl_thread.h"

#if defined(MSL_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

namespace msl {

struct Plan {
    unsigned order = 0, processes = 1, timeout = 0;
    Position grid{1, 1, 1}, group{1, 1, 1};
    std::vector<Buffer> buffers;  // arguments, then results: the order of the kernel's parameters
    size_t arguments = 0;
};

[[noreturn]] inline void bad_plan(const char* what) {
    perror(what);
    _exit(2);
}

// A file's range in memory that all worker processes share. Under ASan the memory around it is poisoned, which a
// mapping of the file cannot offer: its pages go on after the range.
inline char* map_range(const char* path, size_t offset, size_t bytes, bool writable) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const int file = open(path, writable ? O_RDWR : O_RDONLY);
    if (file < 0) bad_plan(path);
#if defined(MSL_ADDRESS)
    const size_t room = (bytes + page - 1) / page * page;
    void* memory = mmap(nullptr, room + 2 * page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) bad_plan(path);
    char* data = static_cast<char*>(memory) + page;
    for (size_t done = 0; done < bytes;) {
        const ssize_t got = pread(file, data + done, bytes - done, off_t(offset + done));
        if (got <= 0) bad_plan(path);
        done += size_t(got);
    }
    if (!writable) mprotect(data, room, PROT_READ);
    __asan_poison_memory_region(memory, page);
    __asan_poison_memory_region(data + bytes, room - bytes + page);
#else
    const size_t before = offset % page;
    const int access = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* memory = mmap(nullptr, bytes + before, access, MAP_SHARED, file, off_t(offset - before));
    if (memory == MAP_FAILED) bad_plan(path);
    char* data = static_cast<char*>(memory) + before;
#endif
    close(file);
    return data;
}

// `type` ends with an element's bytes.
inline size_t elements(const Buffer& buffer) { return buffer.bytes / size_t(buffer.type[1] - '0'); }

inline void read_buffer(Plan& plan, const char* line, bool writable) {
    Buffer buffer{};
    size_t offset = 0;
    int used = 0;
    sscanf(line, "%127s %3s %zu %zu %u%n", buffer.name, buffer.type, &offset, &buffer.bytes, &buffer.rank, &used);
    for (uint32_t axis = 0; axis < buffer.rank; axis++) {
        long long extent = 0;
        int more = 0;
        sscanf(line + used, " %lld%n", &extent, &more);
        buffer.shape[axis] = extent;
        used += more;
    }
    buffer.data = map_range(line + used + 1, offset, buffer.bytes, writable);
#if defined(MSL_COUNT)
    buffer.accesses = new uint32_t[elements(buffer)]();
#endif
    plan.buffers.push_back(buffer);
    plan.arguments += !writable;
}

inline Plan read_plan(const char* path) {
    Plan plan;
    FILE* file = fopen(path, "r");
    if (!file) bad_plan(path);
    char* line = nullptr;
    size_t room = 0;
    while (getline(&line, &room, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        char key[16];
        int used = 0;
        sscanf(line, "%15s %n", key, &used);
        const char* rest = line + used;
        if (!strcmp(key, "order")) sscanf(rest, "%u", &plan.order);
        if (!strcmp(key, "processes")) sscanf(rest, "%u", &plan.processes);
        if (!strcmp(key, "timeout")) sscanf(rest, "%u", &plan.timeout);
        if (!strcmp(key, "grid")) sscanf(rest, "%u %u %u", &plan.grid.x, &plan.grid.y, &plan.grid.z);
        if (!strcmp(key, "group")) sscanf(rest, "%u %u %u", &plan.group.x, &plan.group.y, &plan.group.z);
        if (!strcmp(key, "argument")) read_buffer(plan, rest, false);
        if (!strcmp(key, "result")) read_buffer(plan, rest, true);
    }
    free(line);
    fclose(file);
    return plan;
}

// ASan's results live beside their files.
inline void store_results(const Plan& plan, const char* const* paths) {
    for (size_t i = plan.arguments; i < plan.buffers.size(); i++) {
        FILE* file = fopen(paths[i - plan.arguments], "wb");
        if (!file || fwrite(plan.buffers[i].data, 1, plan.buffers[i].bytes, file) != plan.buffers[i].bytes)
            bad_plan(paths[i - plan.arguments]);
        fclose(file);
    }
}

}  // namespace msl
