// What the emulation needs of the standard library.
#pragma once
#include <algorithm>
#include <atomic>
#include <barrier>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>
#include <ucontext.h>
