// An operation of a device, and the moment at which it ends.
#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace late {

// A position in a stream, which is over once the device has passed it: what a CUDA event records.
struct Moment {
  bool over = false;
  double time = 0;  // In microseconds of the device, which pass only while it works.
  int device = -1;
  int stream = -1;
  std::string label;
  // For captured operations: the graph, counted from 1, and the operation's place in it.
  int graph = 0;
  size_t place = 0;
};
using Ending = std::shared_ptr<Moment>;

struct Operation {
  std::string label;
  std::function<void()> run;     // What it does to memory. Raw addresses only, because nothing keeps tensors alive for it.
  std::vector<Ending> after;     // What other streams have to reach first (cudaStreamWaitEvent).
  double cost = 1;               // In microseconds of the device.
  bool copies = false;           // Whether a copy engine runs it.
  bool joint = false;            // Whether it continues after `run`, until its peers have begun, too.
  Ending end = std::make_shared<Moment>();
  // Makes a joint operation once more, for a graph that is replayed.
  std::function<Operation()> again;
};

}  // namespace late
