// Fibers: one stack per Metal thread and a switch of about ten nanoseconds, told to the sanitizers.
// x86-64 and AArch64, Linux and macOS. Compiled without instrumentation.
#pragma once
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(MSL_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(MSL_THREAD)
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
}
#endif

// Saves the callee-saved registers and the stack pointer, takes the other stack and returns there.
extern "C" void msl_switch(void** save, void* load) __asm__("msl_switch");

#if defined(__x86_64__)
__asm__(
    ".text\n"
    "msl_switch:\n"
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n"
    "movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    "ret\n");
#elif defined(__aarch64__)
__asm__(
    ".text\n"
    ".p2align 2\n"
    "msl_switch:\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n"
    "str x9, [x0]\n"
    "mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n"
    "ret\n");
#else
#error "kernels run on x86-64 and AArch64 only: msl_switch is written for no other processor"
#endif

namespace msl {

#if defined(MSL_ADDRESS)
constexpr size_t stack_bytes = 256 << 10;  // redzones make frames larger
#else
constexpr size_t stack_bytes = 64 << 10;
#endif

struct Fiber {
    void* stack_pointer = nullptr;
    const void* stack = nullptr;  // lowest address; a guard page lies below
    size_t size = 0;
    void* sanitizer = nullptr;  // TSan's fiber, or ASan's fake stack while switched away
};

inline void* first_frame(char* top, void (*entry)()) {
    auto** frame = reinterpret_cast<void**>(top);
#if defined(__x86_64__)
    *--frame = nullptr;  // no caller; leaves the alignment a called function sees
    *--frame = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; i++) *--frame = nullptr;
#else
    frame -= 20;
    for (int i = 0; i < 20; i++) frame[i] = nullptr;
    frame[11] = reinterpret_cast<void*>(entry);  // x30, the address that msl_switch returns to
#endif
    return frame;
}

// `count` fibers which start in `entry` (it never returns).
inline void make_fibers(Fiber* const* fibers, size_t count, void (*entry)()) {
    const size_t page = size_t(sysconf(_SC_PAGESIZE));
    const size_t stride = stack_bytes + page;
    void* memory = mmap(nullptr, count * stride, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    if (memory == MAP_FAILED) {
        perror("stacks");
        _exit(2);
    }
    for (size_t i = 0; i < count; i++) {
        char* guard = static_cast<char*>(memory) + i * stride;
        mprotect(guard, page, PROT_NONE);
        fibers[i]->stack = guard + page;
        fibers[i]->size = stack_bytes;
        fibers[i]->stack_pointer = first_frame(guard + stride, entry);
#if defined(MSL_THREAD)
        fibers[i]->sanitizer = __tsan_create_fiber(0);
#endif
    }
}

// The stack that the program began on: the scheduler's.
inline void adopt_current(Fiber& fiber) {
#if defined(MSL_THREAD)
    fiber.sanitizer = __tsan_get_current_fiber();
#else
    (void)fiber;
#endif
}

inline void switch_fiber(Fiber& from, Fiber& to) {
#if defined(MSL_ADDRESS)
    __sanitizer_start_switch_fiber(&from.sanitizer, to.stack, to.size);
#elif defined(MSL_THREAD)
    __tsan_switch_to_fiber(to.sanitizer, 1);  // 1: a switch alone orders no memory
#endif
    msl_switch(&from.stack_pointer, to.stack_pointer);
#if defined(MSL_ADDRESS)
    __sanitizer_finish_switch_fiber(from.sanitizer, nullptr, nullptr);
#endif
}

// The first thing a new fiber does; learns the bounds of the stack it was switched from.
inline void arrive(Fiber& from) {
#if defined(MSL_ADDRESS)
    __sanitizer_finish_switch_fiber(nullptr, &from.stack, &from.size);
#else
    (void)from;
#endif
}

}  // namespace msl
