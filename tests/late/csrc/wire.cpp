// See wire.h.
#include "wire.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <list>
#include <map>
#include <memory>
#include <thread>

#include "machine.h"

namespace late {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Addresses are cheap, and pages are made when they are touched, so this is generous.
constexpr size_t kChannelBytes = size_t(64) << 20;
constexpr size_t kNumEntries = 2048;
constexpr size_t kAlignment = 64;
// If the host does nothing for this long, its devices work by themselves.
constexpr auto kIdle = std::chrono::milliseconds(10);
constexpr auto kLook = std::chrono::milliseconds(1);

// Messages from one rank to another: the sender counts those that it has begun, the receiver those that it has taken.
struct Channel {
  std::atomic<uint64_t> sent, taken;
  struct Entry {
    uint64_t offset, nbytes;
  } entries[kNumEntries];
};

// The last two collectives: a rank that begins the next one has ended the first of them, so all ranks have read it.
struct Part {
  uint64_t number;
  int64_t nbytes;
  int32_t root;
  char dtype;
  char kind[15];
};

struct Head {
  std::atomic<uint64_t> begun;
  Part parts[2];
};

struct Board {
  char* base = nullptr;
  int size = 0;

  static size_t nbytes(int size) {
    return (sizeof(Head) + 4095) / 4096 * 4096 + static_cast<size_t>(size) * ((sizeof(Channel) + 4095) / 4096 * 4096) +
           (static_cast<size_t>(size) + 2) * kChannelBytes;
  }
  Head& head() const { return *reinterpret_cast<Head*>(base); }
  Channel& channel(int to) const {
    return *reinterpret_cast<Channel*>(base + (sizeof(Head) + 4095) / 4096 * 4096 +
                                       static_cast<size_t>(to) * ((sizeof(Channel) + 4095) / 4096 * 4096));
  }
  char* data(int which) const { return base + nbytes(size) - (static_cast<size_t>(size) + 2 - static_cast<size_t>(which)) * kChannelBytes; }
  char* messages(int to) const { return data(to); }
  char* part(uint64_t number) const { return data(size + static_cast<int>(number % 2)); }
};

struct Communicator {
  ~Communicator() {
    for (auto& board : boards)
      if (board.base) munmap(board.base, Board::nbytes(board.size));
    if (descriptor >= 0) close(descriptor);
  }

  int rank = 0;
  int descriptor = -1;
  std::vector<Board> boards;
  std::vector<size_t> used;  // Bytes of each channel's memory.
  bool aborted = false;
};

struct Kernel {
  Ending end;
  Communicator* communicator;
  std::string label;
  std::vector<WiredMessage> receives;
  std::vector<std::pair<int, uint64_t>> sent;  // The receiver, and how many messages it has to have taken.
  std::shared_ptr<Contribution> contribution;
  uint64_t number = 0;
};

struct Watched {
  Ending end;
  Clock::time_point issued;
  double timeout_s;
};

std::map<std::string, std::unique_ptr<Communicator>> communicators;
std::list<Kernel> running;
std::list<Watched> watched;
std::atomic<bool> by_itself{false};
std::atomic<Clock::rep> last_seen{0};

Board map_whole(int descriptor, int size) {
  void* base = mmap(nullptr, Board::nbytes(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
  TORCH_CHECK(base != MAP_FAILED, "late: no memory to share between processes: ", std::strerror(errno));
  return {static_cast<char*>(base), size};
}

void write(Kernel& kernel, const WiredMessage& message) {
  auto& communicator = *kernel.communicator;
  auto& board = communicator.boards[communicator.rank];
  auto& channel = board.channel(message.peer);
  uint64_t number = channel.sent.load(std::memory_order_relaxed);
  auto& used = communicator.used[message.peer];
  if (channel.taken.load(std::memory_order_acquire) == number) used = 0;
  size_t length = (message.nbytes + kAlignment - 1) / kAlignment * kAlignment;
  TORCH_CHECK(used + length <= kChannelBytes && number - channel.taken.load() < kNumEntries, "late: ", kernel.label, ": more than ",
              kNumEntries, " messages or ", kChannelBytes, " bytes by one kernel");
  std::memcpy(board.messages(message.peer) + used, message.address, message.nbytes);
  channel.entries[number % kNumEntries] = {used, message.nbytes};
  used += length;
  channel.sent.store(number + 1, std::memory_order_release);
  kernel.sent.emplace_back(message.peer, number + 1);
}

void write(Kernel& kernel) {
  auto& communicator = *kernel.communicator;
  auto& own = *kernel.contribution;
  auto& board = communicator.boards[communicator.rank];
  kernel.number = board.head().begun.load(std::memory_order_relaxed);
  TORCH_CHECK(own.nbytes <= kChannelBytes, "late: ", kernel.label, " of more than ", kChannelBytes, " bytes");
  Part part{kernel.number, static_cast<int64_t>(own.nbytes), own.root, own.dtype, {}};
  std::strncpy(part.kind, own.kind.c_str(), sizeof part.kind - 1);
  board.head().parts[kernel.number % 2] = part;
  std::memcpy(board.part(kernel.number), own.input, own.nbytes);
  board.head().begun.store(kernel.number + 1, std::memory_order_release);
}

// Receive the messages of a kernel that have arrived, in each sender's order.
void take(Kernel& kernel) {
  auto& communicator = *kernel.communicator;
  std::vector<WiredMessage> left;
  std::vector<bool> waits(communicator.boards.size());
  for (auto& message : kernel.receives) {
    auto& board = communicator.boards[message.peer];
    auto& channel = board.channel(communicator.rank);
    uint64_t number = channel.taken.load(std::memory_order_relaxed);
    if (waits[message.peer] || channel.sent.load(std::memory_order_acquire) == number) {
      waits[message.peer] = true;
      left.push_back(message);
      continue;
    }
    auto entry = channel.entries[number % kNumEntries];
    TORCH_CHECK(entry.nbytes == message.nbytes, "late: ", kernel.label, ": ", entry.nbytes, " bytes are sent and ", message.nbytes, " received");
    std::memcpy(message.address, board.messages(communicator.rank) + entry.offset, entry.nbytes);
    channel.taken.store(number + 1, std::memory_order_release);
  }
  kernel.receives = std::move(left);
}

bool over(Kernel& kernel) {
  auto& communicator = *kernel.communicator;
  if (communicator.aborted) return true;
  if (kernel.contribution) {
    auto parts = std::vector<Contribution>();
    for (int rank = 0; rank < static_cast<int>(communicator.boards.size()); ++rank) {
      auto& board = communicator.boards[rank];
      if (board.head().begun.load(std::memory_order_acquire) <= kernel.number) return false;
      auto& part = board.head().parts[kernel.number % 2];
      auto& own = *kernel.contribution;
      parts.push_back({own.communicator, rank, own.size, part.kind, part.root, part.dtype, board.part(kernel.number), nullptr,
                       static_cast<size_t>(part.nbytes)});
    }
    auto result = result_of(parts);
    if (takes_result(*kernel.contribution)) std::memcpy(kernel.contribution->output, result.data(), result.size());
    return true;
  }
  take(kernel);
  if (!kernel.receives.empty()) return false;
  auto& own = communicator.boards[communicator.rank];
  return std::all_of(kernel.sent.begin(), kernel.sent.end(),
                     [&](auto& message) { return own.channel(message.first).taken.load(std::memory_order_acquire) >= message.second; });
}

Operation wired(const Kernel& kernel, const std::vector<WiredMessage>& sends) {
  Operation operation;
  operation.label = kernel.label;
  operation.joint = true;
  auto shared = std::make_shared<Kernel>(kernel);
  shared->end = operation.end;
  operation.run = [shared, sends] {
    if (shared->contribution) write(*shared);
    for (auto& message : sends) write(*shared, message);
    running.push_back(std::move(*shared));
  };
  // A capture does not run, and replays are not watched: ProcessGroupNCCL.cpp, "capture_status".
  operation.again = [kernel, sends] { return wired(kernel, sends); };
  return operation;
}

Ending begin(int device, int stream, Kernel kernel, std::vector<WiredMessage> sends, double timeout_s) {
  Operation operation = wired(kernel, sends);
  std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
  if (!Machine::get().captures(device, stream)) watched.push_back({operation.end, Clock::now(), timeout_s});
  return Machine::get().issue(device, stream, std::move(operation));
}

Communicator& communicator_of(const std::string& name) {
  auto entry = communicators.find(name);
  TORCH_CHECK(entry != communicators.end(), "late: no communicator ", name);
  return *entry->second;
}

// NCCL's watchdog ends a process whose operation takes too long: ProcessGroupNCCL.cpp, Watchdog::runLoop.
void watch(int rank) {
  std::string text;
  {
    std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
    watched.remove_if([](auto& operation) { return operation.end->over; });
    for (auto& operation : watched) {
      double passed = Seconds(Clock::now() - operation.issued).count();
      if (passed < operation.timeout_s) continue;
      text = "late: watchdog of rank " + std::to_string(rank) + ": " + operation.end->label + " was issued " +
             std::to_string(static_cast<int>(passed)) + " s ago and has not ended, its time-out is " +
             std::to_string(static_cast<int>(operation.timeout_s)) + " s." + Machine::get().standing() + "\n";
      break;
    }
  }
  if (text.empty()) return;
  std::cerr << text << std::flush;
  rlimit none{0, 0};
  setrlimit(RLIMIT_CORE, &none);
  std::signal(SIGABRT, SIG_DFL);
  std::abort();
}

}  // namespace

Place make_board(const std::string& name, int rank, int size) {
  std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
  auto communicator = std::make_unique<Communicator>();
  communicator->rank = rank;
  communicator->boards.resize(size);
  communicator->used.resize(size);
  int descriptor = memfd_create("late board", MFD_CLOEXEC);
  TORCH_CHECK(descriptor >= 0 && !ftruncate(descriptor, static_cast<off_t>(Board::nbytes(size))), "late: no shared memory: ",
              std::strerror(errno));
  communicator->descriptor = descriptor;
  communicator->boards[rank] = map_whole(descriptor, size);
  communicators[name] = std::move(communicator);
  return {getpid(), descriptor};
}

void map_board(const std::string& name, int other, Place place) {
  std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
  auto& communicator = communicator_of(name);
  if (other == communicator.rank) return;
  std::string path = "/proc/" + std::to_string(place.process) + "/fd/" + std::to_string(place.descriptor);
  int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(descriptor >= 0, "late: communicator ", name, ": rank ", other, "'s memory at ", path, ": ", std::strerror(errno));
  communicator.boards[other] = map_whole(descriptor, static_cast<int>(communicator.boards.size()));
  close(descriptor);
}

Ending wired_exchange(int device, int stream, const std::string& name, const std::vector<WiredMessage>& messages, const std::string& label,
                      double timeout_s) {
  Kernel kernel;
  kernel.communicator = &communicator_of(name);
  kernel.label = label;
  std::vector<WiredMessage> sends;
  for (auto& message : messages) (message.sends ? sends : kernel.receives).push_back(message);
  return begin(device, stream, std::move(kernel), std::move(sends), timeout_s);
}

Ending wired_collective(int device, int stream, const Contribution& contribution, const std::string& label, double timeout_s) {
  Kernel kernel;
  kernel.communicator = &communicator_of(contribution.communicator);
  kernel.label = label;
  kernel.contribution = std::make_shared<Contribution>(contribution);
  return begin(device, stream, std::move(kernel), {}, timeout_s);
}

void abort_wired(const std::string& name) {
  std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
  auto entry = communicators.find(name);
  if (entry != communicators.end()) entry->second->aborted = true;
}

bool poll_wires() {
  bool any = false;
  for (auto kernel = running.begin(); kernel != running.end();) {
    if (!over(*kernel)) {
      ++kernel;
      continue;
    }
    Machine::get().finish(kernel->end, kernel->end->time);
    kernel = running.erase(kernel);
    any = true;
  }
  return any;
}

bool works_by_itself() { return by_itself; }

void host_is_here() { last_seen = Clock::now().time_since_epoch().count(); }

void work_by_themselves(int rank) {
  TORCH_CHECK(!by_itself.exchange(true), "late: devices of this process work by themselves already");
  std::thread([rank] {
    for (;;) {
      auto seen = Clock::time_point(Clock::duration(last_seen.load()));
      bool idle = Clock::now() - seen > kIdle;
      if (!idle || !Machine::get().step_alone()) {
        watch(rank);
        std::this_thread::sleep_for(kLook);
      }
    }
  }).detach();
}

}  // namespace late
