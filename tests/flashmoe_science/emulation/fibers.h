// CUDA threads as fibers that take turns on one CPU thread. A fiber runs until it has to wait at a barrier.
#pragma once
#include "standard.h"

class Fibers {
    static constexpr size_t kStack = 1 << 18;
    struct Fiber { std::unique_ptr<char[]> stack; ucontext_t entry; jmp_buf place; bool started = false, ended = false; };
    std::vector<Fiber> fibers_;
    size_t current_ = 0;
    jmp_buf scheduler_;
    void* body_;
    void (*call_)(void*, int);
    static inline Fibers* running_;

    static void enter() {
        running_->call_(running_->body_, (int)running_->current_);
        running_->fibers_[running_->current_].ended = true;
        _longjmp(running_->scheduler_, 1);
    }

public:
    // Calls `resume(i)` whenever thread i goes on, `body(i)` once for each.
    template <class Resume, class Body>
    void run(int count, Resume resume, Body body) {
        running_ = this;
        body_ = &body, call_ = [](void* of, int i) { (*(Body*)of)(i); };
        fibers_ = std::vector<Fiber>(count);
        // Forwards and backwards in turns, so that neither order hides a missing barrier.
        bool forwards = true;
        for (int left = count; left > 0; forwards = !forwards) {
            for (int n = 0; n < count; n++) {
                current_ = forwards ? n : count - 1 - n;
                Fiber& fiber = fibers_[current_];
                if (fiber.ended) continue;
                resume((int)current_);
                if (_setjmp(scheduler_) == 0) {
                    if (fiber.started) _longjmp(fiber.place, 1);
                    fiber.started = true;
                    fiber.stack.reset(new char[kStack]);  // not written to: 64 MB of them for a block
                    getcontext(&fiber.entry);
                    fiber.entry.uc_stack.ss_sp = fiber.stack.get();
                    fiber.entry.uc_stack.ss_size = kStack;
                    makecontext(&fiber.entry, enter, 0);
                    setcontext(&fiber.entry);
                }
                if (fibers_[current_].ended) left--;
            }
        }
    }
    // Lets the others go on.
    static void yield() {
        if (_setjmp(running_->fibers_[running_->current_].place) == 0) _longjmp(running_->scheduler_, 1);
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
    void wait(unsigned phase) {
        while (phase_ == phase) Fibers::yield();
    }
    void arrive_and_wait() { wait(arrive()); }
    void arrive_and_drop() {
        if (--expected_ == arrived_ && expected_ > 0) release();
    }
};
