// wgmma.mma_async m64nNk16, 16-bit operands, fp32 accumulators (PTX ISA, "Asynchronous warpgroup level matrix
// multiply-accumulate"). A warpgroup holds 64 x N accumulators: thread t of warp w holds, in d[4i .. 4i+3], row
// 16w + t/4 at columns 8i + 2(t%4) + {0, 1}, then row + 8 at the same columns.
//
//   ss: A and B from shared memory (descriptors), K-major; A_ACROSS, B_ACROSS: MN-major (transposed).
//   rs: A from registers, B from shared memory, MN-major (transposed); B_ACROSS = 0: K-major.
#pragma once

#include "types.cuh"

#ifndef WGMMA_TYPES
#if ELEMENT_BF16
#define WGMMA_TYPES "bf16.bf16"
#else
#define WGMMA_TYPES "f16.f16"
#endif
#endif

namespace ptx {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Leaves at most PENDING of the newest groups unfinished.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads or writes of registers across an asynchronous product.
template <int COUNT>
__device__ __forceinline__ void pin(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// The same before a product that does not add to what the registers hold. Tells the compiler that it is not needed: an
// accumulator is an operand that is read, as far as it can see, and would occupy its registers until then.
template <int COUNT>
__device__ __forceinline__ void forget(float (&registers)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "=f"(registers[i])::"memory");
}

template <int N>
struct Wgmma;

// wgmma names every accumulator register in its operand list. These write f(1) to f(10 t - 1), then f(10 t) and so on.
#define WGMMA_NAME(i) ", %" #i
#define WGMMA_REGISTER(i) , "+f"(d[i])
#define WGMMA_TENS_1(f) f(1) f(2) f(3) f(4) f(5) f(6) f(7) f(8) f(9)
#define WGMMA_TENS_2(f) WGMMA_TENS_1(f) WGMMA_ONES_10(f, 1)
#define WGMMA_TENS_3(f) WGMMA_TENS_2(f) WGMMA_ONES_10(f, 2)
#define WGMMA_TENS_4(f) WGMMA_TENS_3(f) WGMMA_ONES_10(f, 3)
#define WGMMA_TENS_5(f) WGMMA_TENS_4(f) WGMMA_ONES_10(f, 4)
#define WGMMA_TENS_6(f) WGMMA_TENS_5(f) WGMMA_ONES_10(f, 5)
#define WGMMA_TENS_7(f) WGMMA_TENS_6(f) WGMMA_ONES_10(f, 6)
#define WGMMA_TENS_8(f) WGMMA_TENS_7(f) WGMMA_ONES_10(f, 7)
#define WGMMA_TENS_9(f) WGMMA_TENS_8(f) WGMMA_ONES_10(f, 8)
#define WGMMA_TENS_10(f) WGMMA_TENS_9(f) WGMMA_ONES_10(f, 9)
#define WGMMA_TENS_11(f) WGMMA_TENS_10(f) WGMMA_ONES_10(f, 10)
#define WGMMA_TENS_12(f) WGMMA_TENS_11(f) WGMMA_ONES_10(f, 11)
#define WGMMA_ONES_0(f, t)
#define WGMMA_ONES_2(f, t) WGMMA_ONES_0(f, t) f(t##0) f(t##1)
#define WGMMA_ONES_4(f, t) WGMMA_ONES_2(f, t) f(t##2) f(t##3)
#define WGMMA_ONES_6(f, t) WGMMA_ONES_4(f, t) f(t##4) f(t##5)
#define WGMMA_ONES_8(f, t) WGMMA_ONES_6(f, t) f(t##6) f(t##7)
#define WGMMA_ONES_10(f, t) WGMMA_ONES_8(f, t) f(t##8) f(t##9)
#define WGMMA_REST(f, TENS, ONES) WGMMA_TENS_##TENS(f) WGMMA_ONES_##ONES(f, TENS)

// The accumulators are 10 TENS + ONES; H to N_: the numbers of the operands after them.
#define WGMMA(N, TENS, ONES, H, I, J, K, L, M, N_) \
template <> \
struct Wgmma<N> { \
    template <int A_ACROSS = 0, int B_ACROSS = A_ACROSS> \
    static __device__ __forceinline__ void ss(float (&d)[N / 2], uint64 a, uint64 b, int accumulate) { \
        asm volatile( \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" #J ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPES " {" \
            "%0" WGMMA_REST(WGMMA_NAME, TENS, ONES) "}, " \
            "%" #H ", %" #I ", p, 1, 1, %" #K ", %" #L ";\n}" \
            : "+f"(d[0]) WGMMA_REST(WGMMA_REGISTER, TENS, ONES) \
            : "l"(a), "l"(b), "r"(accumulate), "n"(A_ACROSS), "n"(B_ACROSS)); \
    } \
 \
    template <int B_ACROSS = 1> \
    static __device__ __forceinline__ void rs(float (&d)[N / 2], uint32 a0, uint32 a1, uint32 a2, uint32 a3, uint64 b, \
                                              int accumulate) { \
        asm volatile( \
            "{\n.reg .pred p;\nsetp.ne.b32 p, %" #M ", 0;\n" \
            "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." WGMMA_TYPES " {" \
            "%0" WGMMA_REST(WGMMA_NAME, TENS, ONES) "}, " \
            "{%" #H ", %" #I ", %" #J ", %" #K "}, %" #L ", p, 1, 1, %" #N_ ";\n}" \
            : "+f"(d[0]) WGMMA_REST(WGMMA_REGISTER, TENS, ONES) \
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(accumulate), "n"(B_ACROSS)); \
    } \
};

WGMMA(32, 1, 6, 16, 17, 18, 19, 20, 21, 22)
WGMMA(48, 2, 4, 24, 25, 26, 27, 28, 29, 30)
WGMMA(64, 3, 2, 32, 33, 34, 35, 36, 37, 38)
WGMMA(80, 4, 0, 40, 41, 42, 43, 44, 45, 46)
WGMMA(96, 4, 8, 48, 49, 50, 51, 52, 53, 54)
WGMMA(112, 5, 6, 56, 57, 58, 59, 60, 61, 62)
WGMMA(128, 6, 4, 64, 65, 66, 67, 68, 69, 70)
WGMMA(144, 7, 2, 72, 73, 74, 75, 76, 77, 78)
WGMMA(160, 8, 0, 80, 81, 82, 83, 84, 85, 86)
WGMMA(176, 8, 8, 88, 89, 90, 91, 92, 93, 94)
WGMMA(192, 9, 6, 96, 97, 98, 99, 100, 101, 102)
WGMMA(256, 12, 8, 128, 129, 130, 131, 132, 133, 134)

#undef WGMMA
#undef WGMMA_NAME
#undef WGMMA_REGISTER

}  // namespace ptx
