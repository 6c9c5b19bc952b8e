// One thing that a device was given to do, and the moment at which it is over.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace late {

// A place in a stream: over once the device has come past it. What an event of CUDA's holds when it was recorded.
struct Moment {
  bool over = false;
  double time = 0;  // In microseconds of the device, which pass only where it works.
  int device = -1;
  int stream = -1;
  std::string label;
  // What was captured: in which graph, and the how many-th of its operations. Numbers of graphs begin with 1.
  int graph = 0;
  size_t place = 0;
};
using Ending = std::shared_ptr<Moment>;

struct Operation {
  std::string label;
  std::function<void()> run;     // What it does to memory. Raw addresses only: nobody keeps tensors for it.
  std::vector<Ending> behind;    // What other streams have to reach first (cudaStreamWaitEvent).
  double cost = 1;               // In microseconds of the device.
  bool copies = false;           // One of a copy engine's.
  bool joint = false;            // It has begun when `run` has, and is over when whoever it needs says so.
  Ending end = std::make_shared<Moment>();
  // Of what others take part in: the same once more, for a graph that is replayed.
  std::function<Operation()> again;
};

}  // namespace late
