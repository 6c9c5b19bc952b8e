// All late devices of this process: their streams, their hardware queues, and what they were given to do.
//
// Nothing is done when it is issued. It is done when a host waits for it, and, with some eagerness, at drawn moments before.
#pragma once
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "operation.h"
#include "order.h"

namespace late {

// torch has 32 streams of each priority and hands out the first again after the last: c10/cuda/CUDAStream.cpp, kStreamsPerPool.
constexpr int kStreamsPerPool = 32;
constexpr int kMaxDevices = 16;
// Branches of replayed graphs have the numbers of their streams and this.
constexpr int kReplays = 1000;

struct Stream {
  int device = 0;
  int id = 0;
  std::deque<Operation> queue;
  Ending last;      // The end of what was issued last; null where nothing was.
  Ending running;   // What has begun and is not over: the next may not begin.
  double clock = 0;
  bool idle() const { return queue.empty() && !(running && !running->over); }
};

// What a device was given between the begin and the end of a capture, to be given again as often as the graph is replayed.
struct Graph {
  int number;
  int device;
  int origin;
  bool open = true;
  std::vector<std::pair<int, Operation>> operations;  // With their streams.
  std::set<int> streams;                              // The first, and those that wait for what was captured.
};

class Machine {
 public:
  static Machine& get();

  // Everything below is called by hosts, by threads of autograd's and by operations that run.
  std::recursive_mutex mutex;
  Order order;
  bool allocation_synchronizes = true;  // Where torch takes a segment of the driver.
  bool lending_synchronizes = false;    // Where a transport does.
  // CUDA_LAUNCH_BLOCKING=1: a host waits for each kernel that it gives (CUDA C++ Programming Guide, environment variables).
  bool launch_blocks = false;

  // Forget everything that was issued and begin anew; `connections` is the number of hardware queues, 0 one a stream.
  void reset(int devices, int connections);
  int devices() const { return devices_; }

  Stream& stream(int device, int id);
  int take_from_pool(int device, bool high_priority);

  // Give a stream something to do. Returns its end.
  Ending issue(int device, int stream, Operation operation);
  // The place behind everything a stream was given.
  Ending mark(int device, int stream, const std::string& label);
  // Nothing that the stream is given from now on begins before that.
  void block(int device, int stream, const Ending& ending);
  // A joint operation is over.
  void finish(const Ending& ending, double time);

  // Host: wait. Throws where nothing can run any more.
  void wait(const Ending& ending);
  void wait_stream(int device, int stream);
  void wait_device(int device);
  // Whether a moment is over; a host that asks again and again gives the devices time.
  bool query(const Ending& ending);
  bool query_stream(int device, int stream);

  // What a stream is given from now on is captured, until the end: cudaStreamBeginCapture, by a thread for itself.
  void begin_capture(int device, int stream);
  // Return the graph's number. Throws where a stream that joined has not come back.
  int end_capture(int device);
  // Give a stream all of a graph.
  void replay(int graph, int stream);
  // What was replayed still runs; the graph's memory may be given to others.
  void drop(int graph);
  // The graph that captures what this stream is given, or what any of the device's is; null for none.
  Graph* captures(int device, int stream);
  Graph* captures(int device);
  bool has_graph(int number) const { return graphs_.count(number); }

  // Let a stream do one thing. False where none can.
  bool step();
  // The same for a device that works by itself: what goes wrong is told to whoever waits next.
  bool step_alone();
  std::string failed;
  // Who waits for what, a line a stream.
  std::string standing();
  // Grows with each operation that is issued or begins, and with each turn of a host: who looks on sees whether a run goes on.
  std::atomic<uint64_t> progress{0};
  std::map<std::string, long> counts;  // Operations issued, by kind: "deferred", "forced".

 private:
  Ending capture(Graph& graph, int stream, Operation operation);
  static void end_all(Graph& graph);
  void join(const Ending& ending, int device, int stream);
  void refuse_captured(const Ending& ending, const std::string& what) const;
  bool step_towards(const Ending& ending, std::set<std::pair<int, int>>& asked);
  bool can_begin(const Stream& stream) const;
  std::deque<int>* hardware_queue(int device, int stream);
  const std::deque<int>* hardware_queue(int device, int stream) const;
  void begin_head(Stream& stream);
  void wait_all(const std::vector<Ending>& endings, const std::string& what);
  std::string blocked_by(const Stream& stream) const;

  int devices_ = 1;
  int connections_ = 0;
  std::array<std::map<int, Stream>, kMaxDevices> streams_;
  // CUDA_DEVICE_MAX_CONNECTIONS: streams share so many queues, and what stands at the head of one holds up what is behind it, of
  // whatever stream (CUDA C++ Programming Guide, environment variables). By device and queue, the streams of what was issued, in order.
  std::array<std::vector<std::deque<int>>, kMaxDevices> queues_;
  std::array<std::array<int, 2>, kMaxDevices> handed_out_{};
  // By number, none of which comes again.
  std::map<int, std::unique_ptr<Graph>> graphs_;
  int num_graphs_ = 0;
};

}  // namespace late
