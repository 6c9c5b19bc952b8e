// Python's interface to late devices. Tensors do not pass here, but through torch.
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "allocator.h"
#include "exchange.h"
#include "hosts.h"
#include "locked.h"
#include "machine.h"
#include "runtime.h"
#include "wire.h"

namespace py = pybind11;
using late::CachingAllocator;
using late::Hosts;
using late::Machine;

namespace {

void reset(int devices, int connections, size_t capacity, bool allocation_synchronizes, bool lending_synchronizes, bool launch_blocks) {
  py::gil_scoped_release without_python;
  late::forget_exchanges();
  late::Locked::get().clear();
  Hosts::get().expect(0);
  Machine::get().reset(devices, connections);
  CachingAllocator::get().reset(capacity);
  Machine::get().allocation_synchronizes = allocation_synchronizes;
  Machine::get().lending_synchronizes = lending_synchronizes;
  Machine::get().launch_blocks = launch_blocks;
  // A training that leaves another process's memory open spoils the next one in the process. On an H200 (CUDA 13.0), the next mapping failed
  // with cudaErrorAlreadyMapped, and without another mapping, a kernel did.
  if (auto left = late::holding().opened; left && late::works_by_itself())
    Machine::get().failed = "late: resource already mapped: this process left " + std::to_string(left) + " mappings of other processes' memory open";
}

// One message of an exchange: channel, whether it is sent, address and bytes.
using Sent = std::tuple<std::string, bool, uintptr_t, size_t>;

late::Ending exchange(int device, int stream, const std::vector<Sent>& sent, const std::string& label) {
  std::vector<late::Message> messages;
  for (auto& [channel, sends, address, nbytes] : sent) messages.push_back({channel, sends, reinterpret_cast<char*>(address), nbytes});
  return late::exchange(device, stream, messages, label);
}

late::Ending collective(int device, int stream, const std::string& communicator, int rank, int size, const std::string& kind, int root,
                        char dtype, uintptr_t input, uintptr_t output, size_t nbytes, const std::string& label) {
  auto *from = reinterpret_cast<const char*>(input);
  auto *to = reinterpret_cast<char*>(output);
  return late::collective(device, stream, {communicator, rank, size, kind, root, dtype, from, to, nbytes}, label);
}

// The same between processes: the peer, whether this rank sends, address and bytes.
using Wired = std::tuple<int, bool, uintptr_t, size_t>;

late::Ending wired_exchange(int device, int stream, const std::string& communicator, const std::vector<Wired>& ends, const std::string& label,
                            double timeout_s) {
  std::vector<late::WiredMessage> messages;
  for (auto& [peer, sends, address, nbytes] : ends) messages.push_back({peer, sends, reinterpret_cast<char*>(address), nbytes});
  return late::wired_exchange(device, stream, communicator, messages, label, timeout_s);
}

late::Ending wired_collective(int device, int stream, const std::string& communicator, int rank, int size, const std::string& kind, int root,
                              char dtype, uintptr_t input, uintptr_t output, size_t nbytes, const std::string& label, double timeout_s) {
  auto *from = reinterpret_cast<const char*>(input);
  auto *to = reinterpret_cast<char*>(output);
  return late::wired_collective(device, stream, {communicator, rank, size, kind, root, dtype, from, to, nbytes}, label, timeout_s);
}

std::pair<int, int> make_board(const std::string& communicator, int rank, int size) {
  auto place = late::make_board(communicator, rank, size);
  return {place.process, place.descriptor};
}

void map_board(const std::string& communicator, int other, int process, int descriptor) {
  late::map_board(communicator, other, {process, descriptor});
}

void order(const std::string& kind, uint64_t seed, int stream, double eagerness) {
  std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
  Machine::get().order.set(kind, seed, stream, eagerness);
}

// Issue an operation with this duration.
void work(int device, int stream, double microseconds) {
  late::Operation operation;
  operation.label = "work";
  operation.cost = microseconds;
  Machine::get().issue(device, stream, std::move(operation));
}

// Kernels that have begun, and end only when they are let go.
std::map<int, late::Ending> held;

void hold(int device, int stream) {
  late::Operation operation;
  operation.label = "a kernel that is held";
  operation.joint = true;
  held[device] = Machine::get().issue(device, stream, std::move(operation));
}

void let_go(int device) { Machine::get().finish(held.at(device), 0); }

void wait_until(const std::function<bool()>& over, const std::string& what) {
  Hosts::Test asks = [&] {
    py::gil_scoped_acquire with_python;
    return over();
  };
  // While a host waits for another one, the devices work.
  Hosts::get().wait_until(asks, [] { return Machine::get().step(); }, what);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  // Other threads run what is issued here, so Python's lock must be released during a wait.
  auto without = py::call_guard<py::gil_scoped_release>();
  m.def("reset", &reset, py::arg("devices"), py::arg("connections"), py::arg("capacity"), py::arg("allocation_synchronizes"),
        py::arg("lending_synchronizes"), py::arg("launch_blocks"));
  m.def("limit", [](size_t capacity) { CachingAllocator::get().limit(capacity); });
  m.def("order", &order, py::arg("kind"), py::arg("seed"), py::arg("stream"), py::arg("eagerness"));
  m.def("holding", [] {
    auto holding = late::holding();
    return std::pair{holding.allocated, holding.opened};
  });
  m.def("devices", [] { return Machine::get().devices(); });
  m.def("counts", [] { return Machine::get().counts; });
  m.def("progress", [] { return Machine::get().progress.load(); });
  m.def("standing", [] { return Machine::get().standing(); });
  m.def("work", &work);
  m.def("hold", &hold);
  m.def("let_go", &let_go);
  py::class_<late::Moment, late::Ending>(m, "Moment");
  m.def("exchange", &exchange);
  m.def("collective", &collective);
  m.def("abort", &late::abort);
  m.def("make_board", &make_board);
  m.def("map_board", &map_board);
  m.def("wired_exchange", &wired_exchange, without);
  m.def("wired_collective", &wired_collective, without);
  m.def("abort_wired", &late::abort_wired);
  m.def("works_by_itself", &late::works_by_itself);
  m.def("work_by_themselves", &late::work_by_themselves);
  m.def("mark", [](int device, int stream) { return Machine::get().mark(device, stream, "event"); });
  m.def("block", [](int device, int stream, const late::Ending& ending) { Machine::get().block(device, stream, ending); });
  m.def("wait", [](const late::Ending& ending) { Machine::get().wait(ending); });
  m.def("query", [](const late::Ending& ending) { return Machine::get().query(ending); });
  m.def("begin_capture", [](int device, int stream) { Machine::get().begin_capture(device, stream); });
  m.def("end_capture", [](int device) {
    int graph = Machine::get().end_capture(device);
    CachingAllocator::get().ended_capture(device);
    return graph;
  });
  m.def("replay", [](int graph, int stream) { Machine::get().replay(graph, stream); }, without);
  m.def("drop", [](int graph) { Machine::get().drop(graph); });
  m.def("pool_bytes", [](int graph) { return CachingAllocator::get().pool_bytes(graph); });
  m.def("expect_hosts", [](int number) { Hosts::get().expect(number); });
  m.def("stuck", [] { return Hosts::get().stuck(); });
  m.def("enter", [](int host) { Hosts::get().enter(host); });
  m.def("leave", [](int host) { Hosts::get().leave(host); });
  m.def("perhaps_yield", [] { Hosts::get().perhaps_yield(); });
  m.def("wait_until", &wait_until);
}
