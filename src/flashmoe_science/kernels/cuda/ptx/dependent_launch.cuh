// Programmatic dependent launch (sm_90 and later): a kernel may start before its predecessor in the stream ends. DEPENDENT
// (macro of kernels): 1: it is launched so.
#pragma once
#include "types.cuh"

// Waits until the predecessor has ended and its writes are visible.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the successor start; what it reads it must still wait for.
__device__ __forceinline__ void allow_successor() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
