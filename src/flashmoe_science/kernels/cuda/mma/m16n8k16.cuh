// Warp-wide matrix product, D += A B with A 16x16 (row major), B 16x8 (column major), D 16x8 in float32.
//
// Fragments, lane l, r = l / 4, c = 2 (l % 4):
//   A: a[0] = (r, c..c+1)  a[1] = (r+8, c..)  a[2] = (r, c+8..)  a[3] = (r+8, c+8..)
//   B: b0 = (c..c+1, r)    b1 = (c+8.., r)
//   D: d[0..1] = (r, c..c+1)  d[2..3] = (r+8, c..c+1)
// so that D's fragments of 16 neighbouring columns, packed, are A's fragment of a following product.
#pragma once
#include "types.cuh"

__device__ __forceinline__ void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
#if MMA_K == 16
#if ELEMENT_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

// D = A B + C.
__device__ __forceinline__ void mma(float (&d)[4], const uint32 (&a)[4], uint32 b0, uint32 b1, const float (&c)[4]) {
#if MMA_K == 16
#if ELEMENT_BF16
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#endif
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#else
    for (int i = 0; i < 4; ++i) d[i] = c[i];
    mma(d, a, b0, b1);
#endif
}
