// What this process has by the calls of runtime.cpp.
#pragma once
#include <cstddef>

namespace late {

// Memory that it made by cudaMalloc and has not freed, and memory of others that it opened and has not closed.
struct Holding {
  size_t made, opened;
};

Holding holding();

}  // namespace late
