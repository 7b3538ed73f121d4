// compute-sanitizer's racecheck follows neither bar.arrive nor what __syncwarp orders before one lane's arrival at an mbarrier.
// RACECHECK 1: a kernel takes a slower way there that it follows.
#pragma once

#ifndef RACECHECK
#define RACECHECK 0
#endif
