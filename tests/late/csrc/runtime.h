// The memory that this process holds through the calls of runtime.cpp.
#pragma once
#include <cstddef>

namespace late {

// Allocations that it made with cudaMalloc and has not freed, and memory of others that it opened and has not closed.
struct Holding {
  size_t allocated, opened;
};

Holding holding();

}  // namespace late
