// All late devices of this process: their streams, their hardware queues, and their operations.
//
// An operation does not run when it is issued, but when a host waits for it or, with some eagerness, at random moments before.
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

// torch has 32 streams of each priority, and starts over after the last one: c10/cuda/CUDAStream.cpp, kStreamsPerPool.
constexpr int kStreamsPerPool = 32;
constexpr int kMaxDevices = 16;
// Branches of replayed graphs have the numbers of their streams plus this.
constexpr int kReplays = 1000;

struct Stream {
  int device = 0;
  int id = 0;
  std::deque<Operation> queue;
  Ending last;     // The end of the last issued operation; null if there is none.
  Ending running;  // An operation that has begun but not ended: the next one may not begin.
  double clock = 0;
  bool idle() const { return queue.empty() && !(running && !running->over); }
};

// The operations that a device was given during a capture, to be issued at each replay of the graph.
struct Graph {
  int number;
  int device;
  int origin;
  bool open = true;
  std::vector<std::pair<int, Operation>> operations;  // With their streams.
  std::set<int> streams;                              // The first, and those that wait for captured operations.
};

class Machine {
 public:
  static Machine& get();

  // All of the following may be called by hosts, autograd's threads and running operations.
  std::recursive_mutex mutex;
  Order order;
  bool allocation_synchronizes = true;  // When torch takes a segment from the driver.
  bool lending_synchronizes = false;    // When a transport allocates.
  // CUDA_LAUNCH_BLOCKING=1: a host waits for each kernel that it issues (CUDA C++ Programming Guide, environment variables).
  bool launch_blocks = false;

  // Forget all operations and start again; `connections` is the number of hardware queues, 0 for one per stream.
  void reset(int devices, int connections);
  int devices() const { return devices_; }

  Stream& stream(int device, int id);
  int take_from_pool(int device, bool high_priority);

  // Issue an operation on a stream, and return its end.
  Ending issue(int device, int stream, Operation operation);
  // Return the position after all operations of a stream.
  Ending mark(int device, int stream, const std::string& label);
  // Make later operations of a stream wait for `ending`.
  void block(int device, int stream, const Ending& ending);
  // End a joint operation.
  void finish(const Ending& ending, double time);

  // Wait as a host. Throws if nothing can run any more.
  void wait(const Ending& ending);
  void wait_stream(int device, int stream);
  void wait_device(int device);
  // Whether a moment is over; repeated queries give the devices time.
  bool query(const Ending& ending);
  bool query_stream(int device, int stream);

  // Capture the stream's operations until the end: cudaStreamBeginCapture, for the thread itself.
  void begin_capture(int device, int stream);
  // Return the graph's number. Throws if a stream that joined the capture was not joined again.
  int end_capture(int device);
  // Issue all operations of a graph.
  void replay(int graph, int stream);
  // Release a graph's memory; operations of its replays still run.
  void drop(int graph);
  // The graph that captures this stream, or any stream of the device; null for none.
  Graph* captures(int device, int stream);
  Graph* captures(int device);
  bool has_graph(int number) const { return graphs_.count(number); }

  // Let a stream run one operation; false if none can.
  bool step();
  // The same for a device that works by itself: the next wait reports its errors.
  bool step_alone();
  std::string failed;
  // What each stream waits for, one line per stream.
  std::string standing();
  // Grows with each operation that is issued or begins, and with each turn of a host, to show whether a run makes progress.
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
  // CUDA_DEVICE_MAX_CONNECTIONS: streams share this many queues, and the head of a queue blocks what comes after it, of whatever stream
  // (CUDA C++ Programming Guide, environment variables). By device and queue, the streams of the issued operations in order.
  std::array<std::vector<std::deque<int>>, kMaxDevices> queues_;
  std::array<std::array<int, 2>, kMaxDevices> handed_out_{};
  // By number; numbers are never reused.
  std::map<int, std::unique_ptr<Graph>> graphs_;
  int num_graphs_ = 0;
};

}  // namespace late
