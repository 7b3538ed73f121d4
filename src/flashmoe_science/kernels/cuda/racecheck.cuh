// compute-sanitizer's racecheck does not follow what __syncwarp orders before one lane's arrival at an mbarrier, and loses
// barriers of the block beside those of some of its warps. RACECHECK 1: a kernel takes a slower way there that it follows.
#pragma once

#ifndef RACECHECK
#define RACECHECK 0
#endif
