// Integer names of fixed width: NVRTC is given no headers, so no <cstdint>.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

namespace ptx {

// The 32-bit address of an object in shared memory, as PTX instructions take it.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

}  // namespace ptx
