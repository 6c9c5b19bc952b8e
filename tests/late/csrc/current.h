// A thread's current device, and its current stream of each device. As in CUDA, every thread has its own, and begins with the first
// device and the default streams (c10/cuda/CUDAStream.cpp, current_streams).
#pragma once

namespace late {

int current_device();
void set_current_device(int device);
int current_stream(int device);
void set_current_stream(int device, int stream);

}  // namespace late
