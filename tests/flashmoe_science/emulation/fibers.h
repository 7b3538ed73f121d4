// CUDA threads as fibers that take turns on one CPU thread. A fiber runs until it has to wait at a barrier, and is passed
// over until what it waits for has come.
#pragma once
#include "standard.h"

class Fibers {
    static constexpr size_t kStack = 1 << 18;
    using Place = void*[5];  // the compiler's own jumps: the C library's look for handlers of cancellation
    struct Fiber {
        std::unique_ptr<char[]> stack;
        ucontext_t entry;
        Place place;
        bool started, ended;
        const unsigned* watched;  // the fiber waits while these bits of it are so
        unsigned bits, same;
    };
    std::vector<Fiber> fibers_;
    size_t current_ = 0;
    Place scheduler_;
    void* body_;
    void (*call_)(void*, int);
    static inline Fibers* running_;

    // A function of its own, as the compiler wants it: none jumps to itself.
    [[noreturn, gnu::noinline]] static void jump(void** place) { __builtin_longjmp(place, 1); }
    static void enter() {
        running_->call_(running_->body_, (int)running_->current_);
        running_->fibers_[running_->current_].ended = true;
        jump(running_->scheduler_);
    }
    [[gnu::noinline]] void go_on(Fiber& fiber) {
        if (__builtin_setjmp(scheduler_) == 0) {
            if (fiber.started) jump(fiber.place);
            fiber.started = true;
            if (!fiber.stack) fiber.stack.reset(new char[kStack]);  // not written to: 64 MB of them for a block
            getcontext(&fiber.entry);
            fiber.entry.uc_stack.ss_sp = fiber.stack.get();
            fiber.entry.uc_stack.ss_size = kStack;
            makecontext(&fiber.entry, enter, 0);
            setcontext(&fiber.entry);
        }
    }

public:
    // What is done beside the threads, as TMA's copies are, when all of them wait: does one thing of those that are to be done;
    // false if there is none.
    static inline bool (*beside)() = nullptr;
    static inline void (*at_end)() = nullptr;

    // Calls `resume(i)` whenever thread i goes on, `body(i)` once for each. Fibers that have run leave their stacks to the
    // next ones. Where all wait for each other, that is the end.
    template <class Resume, class Body>
    void run(int count, Resume resume, Body body) {
        running_ = this;
        body_ = &body, call_ = [](void* of, int i) { (*(Body*)of)(i); };
        fibers_.resize(count);
        for (Fiber& fiber : fibers_) fiber.started = fiber.ended = false, fiber.watched = nullptr;
        // Forwards and backwards in turns, so that neither order hides a missing barrier.
        bool forwards = true;
        for (int left = count; left > 0; forwards = !forwards) {
            bool any = false;
            for (int n = 0; n < count; n++) {
                current_ = forwards ? n : count - 1 - n;
                Fiber& fiber = fibers_[current_];
                if (fiber.ended || (fiber.watched && (*fiber.watched & fiber.bits) == fiber.same)) continue;
                any = true;
                resume((int)current_);
                go_on(fiber);
                if (fiber.ended) left--;
            }
            if (!any && !(beside && beside())) abort();
        }
        while (beside && beside()) continue;
        if (at_end) at_end();
    }
    // Lets the others go on.
    [[gnu::noinline]] static void yield() {
        if (__builtin_setjmp(running_->fibers_[running_->current_].place) == 0) jump(running_->scheduler_);
    }
    // Lets them while these bits of what is watched are the same.
    static void yield_while(const unsigned* watched, unsigned bits, unsigned same) {
        if ((*watched & bits) != same) return;
        Fiber& fiber = running_->fibers_[running_->current_];
        fiber.watched = watched, fiber.bits = bits, fiber.same = same;
        yield();
        fiber.watched = nullptr;
    }
};

class Barrier {
    int expected_, arrived_ = 0;
    unsigned phase_ = 0;
    void release() { arrived_ = 0, phase_++; }

public:
    explicit Barrier(int count) : expected_(count) {}
    // What to wait for.
    unsigned arrive() {
        const unsigned phase = phase_;
        if (++arrived_ == expected_) release();
        return phase;
    }
    void wait(unsigned phase) { Fibers::yield_while(&phase_, ~0u, phase); }
    void arrive_and_wait() { wait(arrive()); }
    void arrive_and_drop() {
        if (--expected_ == arrived_ && expected_ > 0) release();
    }
};
