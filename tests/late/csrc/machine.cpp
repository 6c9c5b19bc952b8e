// See machine.h.
#include "machine.h"

#include <c10/util/Exception.h>

#include <sstream>

#include "hosts.h"
#include "wire.h"

namespace late {

using Guard = std::lock_guard<std::recursive_mutex>;

Machine& Machine::get() {
  static auto* machine = new Machine();  // Never destroyed: tensors may outlive everything.
  return *machine;
}

void Machine::reset(int devices, int connections) {
  Guard guard(mutex);
  TORCH_CHECK(devices > 0 && devices <= kMaxDevices, "late: ", devices, " devices, but there are 1 to ", kMaxDevices);
  devices_ = devices;
  connections_ = connections;
  for (int device = 0; device < kMaxDevices; ++device) {
    for (auto& [id, stream] : streams_[device]) {
      // Waits for these moments end.
      for (auto& operation : stream.queue) operation.end->over = true;
      if (stream.running) stream.running->over = true;
    }
    streams_[device].clear();
    queues_[device].assign(connections, {});
    handed_out_[device] = {};
  }
  for (auto& [number, graph] : graphs_) end_all(*graph);
  graphs_.clear();
  counts.clear();
  failed.clear();
}

void Machine::end_all(Graph& graph) {
  for (auto& [stream, operation] : graph.operations) {
    operation.end->graph = 0;
    operation.end->over = true;
  }
}

void Machine::drop(int number) {
  Guard guard(mutex);
  auto graph = graphs_.find(number);
  if (graph == graphs_.end()) return;
  end_all(*graph->second);
  graphs_.erase(graph);
}

Stream& Machine::stream(int device, int id) {
  auto [entry, added] = streams_.at(device).try_emplace(id);
  if (added) {
    entry->second.device = device;
    entry->second.id = id;
  }
  return entry->second;
}

int Machine::take_from_pool(int device, bool high_priority) {
  Guard guard(mutex);
  int next = handed_out_.at(device)[high_priority]++ % kStreamsPerPool;
  return 1 + next + (high_priority ? kStreamsPerPool : 0);
}

std::deque<int>* Machine::hardware_queue(int device, int stream) {
  return connections_ ? &queues_[device][stream % connections_] : nullptr;
}

const std::deque<int>* Machine::hardware_queue(int device, int stream) const {
  return connections_ ? &queues_[device][stream % connections_] : nullptr;
}

Ending Machine::issue(int device, int id, Operation operation) {
  Ending end = operation.end;
  bool waits = launch_blocks && operation.run && !operation.copies;
  host_is_here();
  {
    Guard guard(mutex);
    end->device = device;
    end->stream = id;
    end->label = operation.label;
    if (Graph* graph = captures(device, id)) return capture(*graph, id, std::move(operation));
    Stream& into = stream(device, id);
    into.queue.push_back(std::move(operation));
    into.last = end;
    if (auto* queue = hardware_queue(device, id)) queue->push_back(id);
    ++progress;
    ++counts["deferred"];
    for (int left = order.meanwhile(); left > 0; --left)
      if (!step()) break;
  }
  if (waits) wait(end);
  return end;
}

Ending Machine::mark(int device, int id, const std::string& label) {
  Operation operation;
  operation.label = label;
  operation.cost = 0;
  return issue(device, id, std::move(operation));
}

void Machine::block(int device, int id, const Ending& ending) {
  // Waiting for an event that was never recorded does nothing: cudaStreamWaitEvent, CUDA Runtime API.
  if (!ending) return;
  join(ending, device, id);
  if (ending->device == device && ending->stream == id) return;
  Operation operation;
  operation.label = "wait for " + ending->label;
  operation.cost = 0;
  operation.after = {ending};
  issue(device, id, std::move(operation));
}

Graph* Machine::captures(int device) {
  Guard guard(mutex);
  for (auto& [number, graph] : graphs_)
    if (graph->open && graph->device == device) return graph.get();
  return nullptr;
}

Graph* Machine::captures(int device, int stream) {
  Graph* graph = captures(device);
  return graph && graph->streams.count(stream) ? graph : nullptr;
}

void Machine::begin_capture(int device, int stream) {
  Guard guard(mutex);
  TORCH_CHECK(!captures(device), "late: device ", device, " captures already");
  ++num_graphs_;
  auto& graph = graphs_[num_graphs_] = std::make_unique<Graph>(Graph{num_graphs_, device, stream});
  graph->streams.insert(stream);
}

Ending Machine::capture(Graph& graph, int stream, Operation operation) {
  Ending end = operation.end;
  end->graph = graph.number;
  end->place = graph.operations.size();
  graph.operations.emplace_back(stream, std::move(operation));
  ++counts["captured"];
  return end;
}

// CUDA Runtime API, cudaStreamWaitEvent and the errors named here; CUDA C++ Programming Guide, cross-stream dependencies and events.
void Machine::join(const Ending& ending, int device, int stream) {
  Guard guard(mutex);
  if (ending->graph) {
    Graph& graph = *graphs_.at(ending->graph);
    TORCH_CHECK(graph.open && graph.device == device, "late: an event of a capture is waited for outside of it (cudaErrorCapturedEvent): ",
                ending->label);
    graph.streams.insert(stream);
  } else {
    TORCH_CHECK(!captures(device, stream), "late: a stream that is captured waits for what is not (cudaErrorStreamCaptureIsolation): ",
                ending->label);
  }
}

void Machine::refuse_captured(const Ending& ending, const std::string& action) const {
  TORCH_CHECK(!ending || !ending->graph, "late: ", action, " what was captured (cudaErrorCapturedEvent): ", ending->label);
}

int Machine::end_capture(int device) {
  Guard guard(mutex);
  Graph* graph = captures(device);
  TORCH_CHECK(graph, "late: device ", device, " captures nothing");
  graph->open = false;
  auto& operations = graph->operations;
  // Walk back from the end of the first stream, along its streams and their waits.
  std::set<size_t> reached;
  std::vector<size_t> next;
  std::vector<long> before(operations.size(), -1);
  std::map<int, long> last;
  for (size_t place = 0; place < operations.size(); ++place) {
    int stream = operations[place].first;
    if (last.count(stream)) before[place] = last[stream];
    last[stream] = static_cast<long>(place);
  }
  if (last.count(graph->origin)) next.push_back(static_cast<size_t>(last[graph->origin]));
  while (!next.empty()) {
    size_t place = next.back();
    next.pop_back();
    if (!reached.insert(place).second) continue;
    if (before[place] >= 0) next.push_back(static_cast<size_t>(before[place]));
    for (auto& ending : operations[place].second.after) next.push_back(ending->place);
  }
  for (size_t place = 0; place < operations.size(); ++place) {
    auto& [stream, operation] = operations[place];
    TORCH_CHECK(reached.count(place) || (!operation.run && !operation.joint), "late: stream ", stream,
                " has not come back to the capture (cudaErrorStreamCaptureUnjoined): ", operation.label);
  }
  return graph->number;
}

void Machine::replay(int number, int stream) {
  Graph* graph;
  {
    Guard guard(mutex);
    graph = graphs_.at(number).get();
    TORCH_CHECK(!graph->open, "late: a graph is replayed while it is captured");
    TORCH_CHECK(!captures(graph->device), "late: a graph is replayed in a capture");
  }
  Ending start = mark(graph->device, stream, "replay");
  std::vector<Ending> ends;
  std::map<int, Ending> last;
  for (auto& [captured, original] : graph->operations) {
    Operation operation = original.again ? original.again() : original;
    if (!original.again) operation.end = std::make_shared<Moment>();
    operation.after.clear();
    for (auto& ending : original.after) operation.after.push_back(ends.at(ending->place));
    // Branches of a graph are on streams of their own.
    int branch = kReplays + (captured == graph->origin ? 0 : captured);
    if (!last.count(branch)) operation.after.push_back(start);
    ends.push_back(issue(graph->device, branch, std::move(operation)));
    last[branch] = ends.back();
  }
  for (auto& [branch, end] : last) block(graph->device, stream, end);
}

void Machine::finish(const Ending& ending, double time) {
  Guard guard(mutex);
  ending->over = true;
  ending->time = std::max(ending->time, time);
  Stream& finished_stream = stream(ending->device, ending->stream);
  finished_stream.clock = std::max(finished_stream.clock, ending->time);
  if (finished_stream.running == ending) finished_stream.running = nullptr;
}

bool Machine::can_begin(const Stream& stream) const {
  if (stream.queue.empty() || (stream.running && !stream.running->over)) return false;
  if (auto* queue = hardware_queue(stream.device, stream.id); queue && queue->front() != stream.id) return false;
  for (auto& ending : stream.queue.front().after)
    if (!ending->over) return false;
  return true;
}

void Machine::begin_head(Stream& stream) {
  Operation operation = std::move(stream.queue.front());
  stream.queue.pop_front();
  if (auto* queue = hardware_queue(stream.device, stream.id)) queue->pop_front();
  ++progress;
  double start = stream.clock;
  for (auto& ending : operation.after) start = std::max(start, ending->time);
  stream.clock = start + operation.cost;
  operation.end->time = stream.clock;
  if (operation.joint) stream.running = operation.end;
  // May finish others and itself.
  if (operation.run) operation.run();
  if (!operation.joint) operation.end->over = true;
}

bool Machine::step() {
  Guard guard(mutex);
  if (poll_wires()) return true;
  std::vector<Choice> choices;
  for (int device = 0; device < devices_; ++device)
    for (auto& [id, stream] : streams_[device])
      if (can_begin(stream)) choices.push_back({device, id, stream.queue.front().copies});
  if (choices.empty()) return false;
  auto& chosen = choices[order.choose(choices)];
  begin_head(stream(chosen.device, chosen.stream));
  return true;
}

bool Machine::step_alone() {
  Guard guard(mutex);
  if (!failed.empty()) return false;
  try {
    return step();
  } catch (const std::exception& error) {
    failed = error.what();
    return false;
  }
}

bool Machine::step_towards(const Ending& ending, std::set<std::pair<int, int>>& visited) {
  if (ending->over || !visited.insert({ending->device, ending->stream}).second) return false;
  Stream& target = stream(ending->device, ending->stream);
  if (can_begin(target)) {
    begin_head(target);
    return true;
  }
  if (target.queue.empty()) return false;
  for (auto& other : target.queue.front().after)
    if (step_towards(other, visited)) return true;
  if (auto* queue = hardware_queue(target.device, target.id); queue && queue->front() != target.id) {
    Stream& ahead = stream(target.device, queue->front());
    if (!ahead.queue.empty() && step_towards(ahead.queue.front().end, visited)) return true;
  }
  return false;
}

void Machine::wait_all(const std::vector<Ending>& endings, const std::string& what) {
  auto over = [&] {
    Guard guard(mutex);
    for (auto& ending : endings)
      if (!ending->over) return false;
    return true;
  };
  auto go_on = [&] {
    Guard guard(mutex);
    if (order.as_late()) {
      std::set<std::pair<int, int>> visited;
      for (auto& ending : endings)
        if (step_towards(ending, visited)) return true;
    }
    return step();
  };
  Hosts::get().wait_until(over, go_on, what);
}

void Machine::wait(const Ending& ending) {
  refuse_captured(ending, "a host waits for");
  if (ending) wait_all({ending}, "a host waits for " + ending->label);
}

void Machine::wait_stream(int device, int id) {
  Ending last;
  {
    Guard guard(mutex);
    TORCH_CHECK(!captures(device, id), "late: a host waits for a stream that is captured (cudaErrorStreamCaptureUnsupported)");
    last = stream(device, id).last;
  }
  if (last) wait_all({last}, "a host waits for stream " + std::to_string(id) + " of device " + std::to_string(device));
}

void Machine::wait_device(int device) {
  std::vector<Ending> endings;
  {
    Guard guard(mutex);
    TORCH_CHECK(!captures(device), "late: a host waits for a device that captures (cudaErrorStreamCaptureUnsupported)");
    for (auto& [id, stream] : streams_.at(device))
      if (stream.last) endings.push_back(stream.last);
  }
  wait_all(endings, "a host waits for device " + std::to_string(device));
}

bool Machine::query(const Ending& ending) {
  Guard guard(mutex);
  refuse_captured(ending, "a host asks for");
  if (ending && !ending->over) step();
  return !ending || ending->over;
}

bool Machine::query_stream(int device, int id) {
  Guard guard(mutex);
  TORCH_CHECK(!captures(device, id), "late: a host asks for a stream that is captured (cudaErrorStreamCaptureUnsupported)");
  if (!stream(device, id).idle()) step();
  return stream(device, id).idle();
}

std::string Machine::blocked_by(const Stream& stream) const {
  if (stream.running && !stream.running->over) return stream.running->label + " has begun and waits for the other end";
  if (stream.queue.empty()) return "";
  auto& head = stream.queue.front();
  for (auto& ending : head.after)
    if (!ending->over)
      return head.label + " waits for " + ending->label + " on stream " + std::to_string(ending->stream) + " of device " +
             std::to_string(ending->device);
  if (auto* queue = hardware_queue(stream.device, stream.id); queue && queue->front() != stream.id)
    return head.label + " is in a hardware queue behind stream " + std::to_string(queue->front());
  return head.label + " can begin";
}

std::string Machine::standing() {
  Guard guard(mutex);
  std::ostringstream text;
  for (int device = 0; device < devices_; ++device)
    for (auto& [id, stream] : streams_[device])
      if (!stream.idle()) text << "\n  device " << device << ", stream " << id << ": " << blocked_by(stream);
  return text.str();
}

}  // namespace late
