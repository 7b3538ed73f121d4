// What the emulation needs of the standard library where CUDA threads are threads.
#pragma once
#include "standard.h"
#include <atomic>
#include <barrier>
#include <thread>
