// Matrix products by a single warp, from the swizzled tiles that TMA writes (see descriptor.cuh).
#pragma once

#include "mma/descriptor.cuh"
#include "ptx/integers.cuh"

namespace mma {

// Address of a 16-byte chunk of a tile of ROWS rows.
template <int ROWS>
__device__ __forceinline__ u32 swizzled(u32 tile, u32 row, u32 chunk) {
    return tile + (chunk / 8) * ROWS * ROW_BYTES + row * ROW_BYTES + ((chunk % 8 ^ row % 8) << 4);
}

// ldmatrix.x4: lanes 8j .. 8j+7 give the row addresses of matrix j.
__device__ __forceinline__ void load_matrices(u32 (&registers)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(address)
                 : "memory");
}

// d += a b, m16n8k16.
__device__ __forceinline__ void multiply(float& d0, float& d1, float& d2, float& d3, const u32 (&a)[4], u32 b0, u32 b1) {
#if BFLOAT16
#define MMA_TYPES "bf16.bf16"
#else
#define MMA_TYPES "f16.f16"
#endif
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPES
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d0), "+f"(d1), "+f"(d2), "+f"(d3)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace mma
