// A value that is computed where it stands.
#pragma once
#include "types.cuh"

namespace ptx {

// The compiler moves what is computed before a loop to where it is used in it, a division too. Not this.
__device__ __forceinline__ int held(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

}  // namespace ptx
