// The program around a compiled kernel: reads the plan, deals the threadgroups out to processes, reports faults.
#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/wait.h>

#include "scheduler.h"

namespace msl {

constexpr int fault_code = 70;

const Thread* self = nullptr;
Lane* current = nullptr;
static Scheduler* scheduler = nullptr;
static const Plan* running_plan = nullptr;

// The section must exist in a kernel without threadgroup storage, too.
#if defined(__APPLE__)
__attribute__((section("__DATA,msltg"), used)) static char storage_anchor[16];
#else
__attribute__((section("msltg"), used)) static char storage_anchor[16];
#endif

static void say(const char* text) {
    for (size_t left = strlen(text); left;) {
        const ssize_t written = write(2, text, left);
        if (written <= 0) return;
        text += written;
        left -= size_t(written);
    }
}

void fault(const char* kind, const char* format, ...) {
    char text[1400], place[256], message[1000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    snprintf(text, sizeof text, "\nMSL-FAULT\t%s\t%s%s\n", kind, message,
             scheduler ? scheduler->place(place, sizeof place) : "");
    say(text);
    _exit(fault_code);
}

void meet(Scope scope, const Site& site, bool orders_memory) {
    Lane& lane = *current;
    char& sync = scope == Scope::threadgroup ? scheduler->barrier_sync[lane.barriers++ & 1]
                                             : scheduler->simd_of(lane).barrier[lane.barriers++ & 1];
    if (orders_memory) release_memory(sync);
    lane.site = site;
    scheduler->leave(scope == Scope::threadgroup ? State::in_threadgroup : State::in_simdgroup);
    if (orders_memory) acquire_memory(sync);
}

const uint64_t* exchange(uint64_t word, const Site& site) {
    Lane& lane = *current;
    uint64_t* words = scheduler->simd_of(lane).words[lane.exchanges++ & 1];
    words[lane.thread.thread_index_in_simdgroup] = word;
    lane.site = site;
    scheduler->leave(State::in_simdgroup);
    return words;
}

static void lane_entry() {
    scheduler->enter();
    for (;;) {
        acquire_memory(scheduler->start_sync);
        run_thread(running_plan->buffers.data());
        release_memory(scheduler->end_sync);
        scheduler->leave(State::ended);
    }
}

static uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

Scheduler::Scheduler(const Plan& plan) : plan_(plan), lanes_(size_t(plan.group.x) * plan.group.y * plan.group.z) {
    const Position &grid = plan.grid, &group = plan.group;
    grid_ = {ceil_div(grid.x, group.x), ceil_div(grid.y, group.y), ceil_div(grid.z, group.z)};
    simd_.resize((lanes_.size() + simd_width - 1) / simd_width);
    std::vector<Fiber*> fibers;
    for (Lane& lane : lanes_) fibers.push_back(&lane.fiber);
    make_fibers(fibers.data(), fibers.size(), lane_entry);
    adopt_current(main_);
}

void Scheduler::enter() { arrive(main_); }

void Scheduler::leave(State state) {
    Lane& lane = *current;
    lane.state = state;
    switch_fiber(lane.fiber, main_);
}

void Scheduler::place_lanes(Position at, uint64_t number) {
    const Position &grid = plan_.grid, &group = plan_.group;
    const Position size{std::min(group.x, grid.x - at.x * group.x), std::min(group.y, grid.y - at.y * group.y),
                        std::min(group.z, grid.z - at.z * group.z)};
    present_ = size_t(size.x) * size.y * size.z;
    const uint32_t simds = ceil_div(uint32_t(present_), simd_width);
    for (SimdGroup& simd : simd_) simd.order.clear();
    for (uint32_t i = 0; i < present_; i++) {
        const Position in{i % size.x, i / size.x % size.y, i / size.x / size.y};
        const uint32_t simd = i / simd_width;
        const uint32_t lanes = std::min(simd_width, uint32_t(present_) - simd * simd_width);
        Lane& lane = lanes_[i];
        lane.thread = Thread{
            .thread_position_in_grid = {at.x * group.x + in.x, at.y * group.y + in.y, at.z * group.z + in.z},
            .thread_position_in_threadgroup = in,
            .threadgroup_position_in_grid = at,
            .threads_per_grid = grid,
            .threads_per_threadgroup = size,
            .threadgroups_per_grid = grid_,
            .dispatch_threads_per_threadgroup = group,
            .thread_index_in_threadgroup = i,
            .thread_index_in_simdgroup = i % simd_width,
            .simdgroup_index_in_threadgroup = simd,
            .simdgroups_per_threadgroup = simds,
            .dispatch_simdgroups_per_threadgroup = uint32_t(simd_.size()),
            .threads_per_simdgroup = simd_width,
            .thread_execution_width = simd_width,
            .present = lanes == simd_width ? ~0u : (1u << lanes) - 1,
        };
        lane.state = State::running;
        lane.exchanges = lane.barriers = 0;
        simd_[simd].order.push_back(&lane);
    }
    order_.clear();
    for (uint32_t i = 0; i < simds; i++) {
        arrange(simd_[i].order, plan_.order, number * 64 + i);
        order_.push_back(&simd_[i]);
    }
    arrange(order_, plan_.order, number * 64 + 63);
}

// Threadgroup memory starts undefined: all ones read as NaN, so nothing of the previous group hides a missing barrier.
// Through a volatile pointer: no call of an instrumented memset.
void Scheduler::fill_storage() {
    for (volatile char* byte = storage_begin; byte < storage_end; byte++) *byte = char(0xFF);
}

void Scheduler::run_group(uint64_t number) {
    const Position at{uint32_t(number % grid_.x), uint32_t(number / grid_.x % grid_.y),
                      uint32_t(number / grid_.x / grid_.y)};
    place_lanes(at, number);
    fill_storage();
    release_memory(start_sync);
    do {
        for (SimdGroup* simd : order_) run_simdgroup(*simd);
        check_threadgroup();
    } while (lanes_[0].state != State::ended);
    acquire_memory(end_sync);
}

static const char* state_text(const Lane& lane, char* text, size_t room) {
    if (lane.state == State::ended) return "has ended";
    snprintf(text, room, "waits in %s at line %u, column %u", lane.site.what, lane.site.line, lane.site.column);
    return text;
}

[[noreturn]] static void diverged(const char* who, const Lane& one, const Lane& other) {
    char first[160], second[160];
    current = nullptr;
    const Thread &a = one.thread, &b = other.thread;
    const Position& group = a.threadgroup_position_in_grid;
    fault("divergent barrier",
          "%s diverged: lane %u of SIMD-group %u %s, but lane %u of SIMD-group %u %s (threadgroup %u, %u, %u)", who,
          a.thread_index_in_simdgroup, a.simdgroup_index_in_threadgroup, state_text(one, first, sizeof first),
          b.thread_index_in_simdgroup, b.simdgroup_index_in_threadgroup, state_text(other, second, sizeof second),
          group.x, group.y, group.z);
}

static bool together(const Lane& a, const Lane& b) {
    return a.state == b.state && (a.state == State::ended || a.site == b.site);
}

// Runs its lanes until all wait for the threadgroup or have ended.
void Scheduler::run_simdgroup(SimdGroup& simd) {
    const Lane& first = *simd.order.front();
    if (first.state == State::ended) return;
    do {
        for (Lane* lane : simd.order) {
            current = lane;
            self = &lane->thread;
            switch_fiber(main_, lane->fiber);
        }
        for (const Lane* lane : simd.order)
            if (!together(first, *lane)) diverged("a SIMD-group", first, *lane);
    } while (first.state == State::in_simdgroup);
}

void Scheduler::check_threadgroup() {
    for (size_t i = 1; i < present_; i++)
        if (!together(lanes_[0], lanes_[i])) diverged("the threadgroup", lanes_[0], lanes_[i]);
}

const char* Scheduler::place(char* text, size_t room) const {
    if (!current) return "";
    const Thread& t = current->thread;
    const Position &group = t.threadgroup_position_in_grid, &in = t.thread_position_in_threadgroup;
    snprintf(text, room, " (lane %u of SIMD-group %u, thread %u, %u, %u of threadgroup %u, %u, %u)",
             t.thread_index_in_simdgroup, t.simdgroup_index_in_threadgroup, in.x, in.y, in.z, group.x, group.y, group.z);
    return text;
}

// What a bad address is: the guard of a stack, an argument (they are read-only), or anything else.
[[noreturn]] static void bad_address(const char* address) {
    for (size_t i = 0; i < running_plan->arguments; i++) {
        const Buffer& buffer = running_plan->buffers[i];
        if (address >= buffer.data && address < buffer.data + buffer.bytes)
            fault("address", "the kernel writes to its argument %s", buffer.name);
    }
    if (current) {
        const char* stack = static_cast<const char*>(current->fiber.stack);
        if (address < stack && address >= stack - sysconf(_SC_PAGESIZE))
            fault("address", "private variables of one thread need more than %zu bytes of stack", stack_bytes);
    }
    fault("address", "bad address %p", static_cast<const void*>(address));
}

static void on_signal(int number, siginfo_t* info, void*) {
    if (number == SIGALRM) fault("timeout", "still running after %u s", running_plan->timeout);
    if (number == SIGFPE) fault("undefined behaviour", "integer division by zero");
    if (number == SIGILL || number == SIGTRAP) fault("undefined behaviour", "trap");
    bad_address(static_cast<const char*>(info->si_addr));
}

static void watch_signals() {
    static char stack[64 << 10];  // a lane's own stack may be what overflowed
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGALRM}) sigaction(number, &action, nullptr);
    alarm(running_plan->timeout);
}

#if defined(MSL_ADDRESS) || defined(MSL_THREAD)
// Behind a sanitizer's own report: which lane ran.
static void name_lane() {
    char text[300], place[256];
    if (!scheduler) return;
    snprintf(text, sizeof text, "\nMSL-LANE\t%s\n", scheduler->place(place, sizeof place));
    say(text);
}
#endif

#if defined(MSL_ADDRESS)
}  // namespace msl
extern "C" void __ubsan_on_report() { msl::name_lane(); }  // UBSan's library knows nothing of ASan's callback
namespace msl {
#endif

// One process's share of the threadgroups.
static void work(unsigned process) {
    watch_signals();
#if defined(MSL_ADDRESS) || defined(MSL_THREAD)
    __sanitizer_set_death_callback(name_lane);
#endif
    Scheduler here(*running_plan);
    scheduler = &here;
    std::vector<uint64_t> numbers;
    for (uint64_t number = process; number < here.groups(); number += running_plan->processes) numbers.push_back(number);
    arrange(numbers, running_plan->order, 0);
    for (uint64_t number : numbers) here.run_group(number);
    scheduler = nullptr;
}

// Forks the workers; the first failure ends the others and is this program's exit code.
static int work_in_processes() {
    std::vector<pid_t> workers;
    for (unsigned process = 0; process < running_plan->processes; process++) {
        const pid_t pid = fork();
        if (pid < 0) bad_plan("fork");
        if (pid == 0) {
            work(process);
            _exit(0);
        }
        workers.push_back(pid);
    }
    for (size_t left = workers.size(); left; left--) {
        int status = 0;
        const pid_t ended = wait(&status);
        workers.erase(std::find(workers.begin(), workers.end(), ended));
        if (status == 0) continue;
        for (pid_t other : workers) kill(other, SIGKILL);
        while (wait(nullptr) > 0 || errno == EINTR) {}
        return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    }
    return 0;
}

}  // namespace msl

#if defined(MSL_COUNT)
namespace msl {
// For every buffer: uses of all its elements, of the least and of the most used one; then threadgroup memory in bytes.
static void report_counts(const Plan& plan) {
    for (const Buffer& buffer : plan.buffers) {
        const uint32_t *first = buffer.accesses, *last = first + elements(buffer);
        const auto [fewest, most] = std::minmax_element(first, last);
        const uint64_t total = std::accumulate(first, last, uint64_t(0));
        fprintf(stderr, "MSL-COUNT\t%s\t%llu\t%u\t%u\n", buffer.name, static_cast<unsigned long long>(total),
                *fewest, *most);
    }
    fprintf(stderr, "MSL-STORAGE\t%td\n", storage_end - storage_begin - ptrdiff_t(sizeof storage_anchor));
}
}  // namespace msl
#endif

// program PLAN RESULT-FILE...
int main(int, char** arguments) {
    const msl::Plan plan = msl::read_plan(arguments[1]);
    msl::running_plan = &plan;
    int code = 0;
    if (plan.processes > 1) code = msl::work_in_processes();
    else msl::work(0);
#if defined(MSL_COUNT)
    if (code == 0) msl::report_counts(plan);
#endif
#if defined(MSL_ADDRESS)
    if (code == 0) msl::store_results(plan, arguments + 2);
#endif
    fflush(nullptr);
    _exit(code);
}
