#pragma once
#include "ptx/named_barrier.cuh"
namespace ptx {
template <int REGISTERS> void give_up_registers() {} template <int REGISTERS> void claim_registers() {}
inline bool elect_lane() { return lane_ == 0; }
}
