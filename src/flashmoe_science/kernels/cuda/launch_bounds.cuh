// MIN_BLOCKS (macro): blocks per multiprocessor that the compiler leaves registers for; 0: as it likes.
#pragma once

#if MIN_BLOCKS > 0
#define LAUNCH_BOUNDS __launch_bounds__(kThreads, MIN_BLOCKS)
#else
#define LAUNCH_BOUNDS __launch_bounds__(kThreads)
#endif
