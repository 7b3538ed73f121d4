// What is compiled ahead for all kernels: of the emulation what many of them include and that reads no macros of a kernel
// but ELEMENT_BF16 and COPIES_LATE.
#pragma once
#include "types.cuh"
#include "mma/m16n8k16.cuh"
#include "ptx/arrival.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/element.cuh"
#include "ptx/global.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/vector.cuh"
#include "ptx/warpgroup.cuh"
#include "ptx/wgmma.cuh"
