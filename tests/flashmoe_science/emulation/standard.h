// What the emulation needs of the standard library: no more than that, as the compiler reads
// it for each kernel, compiled ahead or not.
#pragma once
#include <algorithm>
#include <math.h>
#include <memory>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>
#include <vector>
