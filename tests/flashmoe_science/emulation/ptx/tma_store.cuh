#pragma once
#include "ptx/tma.cuh"
namespace ptx {
inline void tma_store(const TensorMap& map, uint32 from, int x, int y, int z, int w) {
  const int at[] = {x,y,z,w}; const uint64* m = map.opaque; if (m[1] != 4 || from % 1024 || m[11] != 64) abort();
  uint64 total = 1; for (int d=0; d<4; d++) total *= m[11+d];
  for (uint64 i=0; i<total; i++) {
    uint64 rest = i; char* to = (char*)m[0]; bool inside = true;
    for (int d=0; d<4; d++) { const long long a = at[d] + (long long)(rest % m[11+d]); rest /= m[11+d]; inside &= a >= 0 && a < (long long)m[2+d]; to += a * (d == 0 ? 2 : (long long)m[6+d]); }
    uint32 place = from + 2*i; place ^= (place >> 7 & 7) << 4;
    if (inside) memcpy(to, block_->arena.data()+place, 2);
  }
}
}
