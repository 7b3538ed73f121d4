// Boxes with the 128-byte swizzle. A map: address, rank, sizes, strides in bytes after the first, box.
#pragma once
#include "ptx/late.cuh"
#include "ptx/mbarrier.cuh"
namespace ptx {
struct alignas(64) TensorMap { uint64 opaque[16]; };
constexpr uint64 EVICT_FIRST = 0, EVICT_LAST = 0;
inline void prefetch_map(const TensorMap&) {}
// `with`: the map, where to, the barrier, and where the box begins.
inline void copy_box(const uint64* with) {
  const uint64* m = ((const TensorMap*)with[0])->opaque; const uint32 to = with[1]; const int rank = m[1]; const uint64* first = with + 3;
  uint64 total = 1; for (int d=0; d<rank; d++) total *= m[11+d];
  for (uint64 i=0; i<total; i++) {
    uint64 rest = i; const char* from = (const char*)m[0]; bool inside = true;
    for (int d=0; d<rank; d++) { const long long x = (long long)first[d] + (long long)(rest % m[11+d]); rest /= m[11+d]; inside &= x >= 0 && x < (long long)m[2+d]; from += x * (d == 0 ? 2 : (long long)m[6+d]); }
    uint32 place = to + 2*i; place ^= (place >> 7 & 7) << 4;
    uint16 x = 0; if (inside) memcpy(&x, from, 2);
    memcpy(block_->arena.data()+place, &x, 2);
  }
  mbarrier_complete(with[2], 2*(int)total);
}
template <class... At> void tma_load(const TensorMap& map, uint32 to, uint32 barrier, At... at) {
  if (map.opaque[1] != sizeof...(At) || to % 1024 && map.opaque[11] != 64) abort();
  copy_sooner_or_later({block_, copy_box, {(uint64)&map, to, barrier, (uint64)(long long)at...}});
}
inline void tma_load(const TensorMap& map, uint32 to, uint32 barrier, uint64, int x, int y, int z, int w) { tma_load(map, to, barrier, x, y, z, w); }
// `with`: the map and where the box begins.
inline void store_box(const char* bytes, const uint64* with) {
  const uint64* m = ((const TensorMap*)with[0])->opaque; const uint64* at = with + 1;
  uint64 total = 1; for (int d=0; d<4; d++) total *= m[11+d];
  for (uint64 i=0; i<total; i++) {
    uint64 rest = i; char* to = (char*)m[0]; bool inside = true;
    for (int d=0; d<4; d++) { const long long a = (long long)at[d] + (long long)(rest % m[11+d]); rest /= m[11+d]; inside &= a >= 0 && a < (long long)m[2+d]; to += a * (d == 0 ? 2 : (long long)m[6+d]); }
    uint32 place = 2*i; place ^= (place >> 7 & 7) << 4;
    if (inside) memcpy(to, bytes + place, 2);
  }
}
inline void tma_store(const TensorMap& map, uint32 from, int x, int y, int z, int w) {
  const uint64* m = map.opaque; if (m[1] != 4 || from % 1024 || m[11] != 64) abort();
  uint64 total = 1; for (int d=0; d<4; d++) total *= m[11+d];
  store_later({block_, threadIdx.x, from, (uint32)(2*total), store_box, {(uint64)&map, (uint64)(long long)x, (uint64)(long long)y, (uint64)(long long)z, (uint64)(long long)w}, {}});
}
}
