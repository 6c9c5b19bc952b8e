// See exchange.h.
#include "exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <set>

#include "machine.h"

namespace late {
namespace {

struct Kernel {
  Ending end;
  size_t left;
};

struct End {
  std::shared_ptr<Kernel> kernel;
  Message message;
};

struct Channel {
  std::deque<End> sends, receives;
};

struct Part {
  std::shared_ptr<Kernel> kernel;
  Contribution contribution;
};

std::map<std::string, Channel> channels;
std::map<std::string, std::vector<Part>> meetings;
// The number of collectives begun, by communicator and rank.
std::map<std::pair<std::string, int>, long> begun;
std::set<std::string> aborted;

bool belongs(const std::string& name, const std::string& communicator) {
  return name.rfind(communicator + ":", 0) == 0 || name.rfind(communicator + "#", 0) == 0;
}

// Kernels that begin in an aborted communicator end at once.
bool is_aborted(const std::string& name) {
  return std::any_of(aborted.begin(), aborted.end(), [&](auto& communicator) { return belongs(name, communicator); });
}

void count_down(const std::shared_ptr<Kernel>& kernel, double time) {
  kernel->end->time = std::max(kernel->end->time, time);
  if (!--kernel->left) Machine::get().finish(kernel->end, time);
}

void meet(Channel& channel) {
  while (!channel.sends.empty() && !channel.receives.empty()) {
    End from = channel.sends.front(), to = channel.receives.front();
    channel.sends.pop_front();
    channel.receives.pop_front();
    TORCH_CHECK(from.message.nbytes == to.message.nbytes, "late: ", from.message.channel, ": ", from.message.nbytes, " bytes are sent and ",
                to.message.nbytes, " received");
    std::memcpy(to.message.address, from.message.address, to.message.nbytes);
    double time = std::max(from.kernel->end->time, to.kernel->end->time);
    count_down(from.kernel, time);
    count_down(to.kernel, time);
  }
}

// From the last rank down. NCCL promises no order; this is the order of gloo's ring for a single number, such as a norm, so that a run
// can be compared bit by bit with one on CPUs.
template <typename T>
void reduce_as(const std::vector<Contribution>& parts, std::vector<char>& result) {
  size_t count = result.size() / sizeof(T);
  auto* into = reinterpret_cast<T*>(result.data());
  auto& kind = parts.front().kind;
  for (size_t part = parts.size(); part-- > 0;) {
    auto* from = reinterpret_cast<const T*>(parts[part].input);
    for (size_t i = 0; i < count; ++i) {
      if (part + 1 == parts.size()) into[i] = from[i];
      else if (kind == "sum") into[i] += from[i];
      else if (kind == "max") into[i] = std::max(into[i], from[i]);
      else into[i] = std::min(into[i], from[i]);
    }
  }
}

std::vector<char> reduced(const std::vector<Contribution>& parts) {
  auto& first = parts.front();
  std::vector<char> result(first.nbytes);
  switch (first.dtype) {
    case 'f': reduce_as<float>(parts, result); break;
    case 'd': reduce_as<double>(parts, result); break;
    case 'q': reduce_as<int64_t>(parts, result); break;
    case 'i': reduce_as<int32_t>(parts, result); break;
    case '?':
    case 'B': reduce_as<uint8_t>(parts, result); break;
    default: TORCH_CHECK(false, "late: no reduction of numbers of type ", first.dtype);
  }
  return result;
}

void finish_meeting(std::vector<Part>& parts) {
  std::sort(parts.begin(), parts.end(), [](auto& left, auto& right) { return left.contribution.rank < right.contribution.rank; });
  double time = 0;
  std::vector<Contribution> contributions;
  for (auto& part : parts) {
    time = std::max(time, part.kernel->end->time);
    contributions.push_back(part.contribution);
  }
  auto result = result_of(contributions);
  for (auto& part : parts) {
    if (takes_result(part.contribution)) std::memcpy(part.contribution.output, result.data(), result.size());
    count_down(part.kernel, time);
  }
}

// `run` is what the kernel does when it begins.
Operation joint(const std::string& label, size_t left, const std::function<void(const std::shared_ptr<Kernel>&)>& run) {
  Operation operation;
  auto kernel = std::make_shared<Kernel>(Kernel{operation.end, left});
  operation.label = label;
  operation.joint = true;
  operation.run = [kernel, run] { run(kernel); };
  operation.again = [label, left, run] { return joint(label, left, run); };
  return operation;
}

}  // namespace

std::vector<char> result_of(const std::vector<Contribution>& parts) {
  auto& first = parts.front();
  for (auto& own : parts)
    TORCH_CHECK(own.kind == first.kind && own.nbytes == first.nbytes && own.root == first.root, "late: communicator ", own.communicator,
                ": rank ", first.rank, " is at ", first.kind, " of ", first.nbytes, " bytes and rank ", own.rank, " at ", own.kind, " of ",
                own.nbytes);
  std::vector<char> result;
  if (first.kind == "gather")
    for (auto& part : parts) result.insert(result.end(), part.input, part.input + first.nbytes);
  else if (first.kind == "broadcast")
    result.assign(parts.at(first.root).input, parts.at(first.root).input + first.nbytes);
  else
    result = reduced(parts);
  return result;
}

bool takes_result(const Contribution& contribution) {
  return contribution.root < 0 || contribution.kind == "broadcast" || contribution.rank == contribution.root;
}

Ending exchange(int device, int stream, const std::vector<Message>& messages, const std::string& label) {
  auto run = [messages](const std::shared_ptr<Kernel>& kernel) {
    for (auto& message : messages) {
      if (is_aborted(message.channel)) {
        count_down(kernel, 0);
        continue;
      }
      auto& channel = channels[message.channel];
      (message.sends ? channel.sends : channel.receives).push_back({kernel, message});
      meet(channel);
    }
  };
  return Machine::get().issue(device, stream, joint(label, messages.size(), run));
}

Ending collective(int device, int stream, const Contribution& contribution, const std::string& label) {
  auto run = [contribution](const std::shared_ptr<Kernel>& kernel) {
    long number = begun[{contribution.communicator, contribution.rank}]++;
    auto key = contribution.communicator + "#" + std::to_string(number);
    if (is_aborted(key)) return count_down(kernel, 0);
    auto& parts = meetings[key];
    parts.push_back({kernel, contribution});
    if (static_cast<int>(parts.size()) < contribution.size) return;
    auto all = std::move(parts);
    meetings.erase(key);
    finish_meeting(all);
  };
  return Machine::get().issue(device, stream, joint(label, 1, run));
}

void forget_exchanges() {
  std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
  channels.clear();
  meetings.clear();
  begun.clear();
  aborted.clear();
}

void abort(const std::string& communicator) {
  std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
  aborted.insert(communicator);
  for (auto& [name, channel] : channels)
    if (belongs(name, communicator))
      for (auto* ends : {&channel.sends, &channel.receives}) {
        for (auto& end : *ends) Machine::get().finish(end.kernel->end, 0);
        ends->clear();
      }
  for (auto meeting = meetings.begin(); meeting != meetings.end();) {
    if (!belongs(meeting->first, communicator)) {
      ++meeting;
      continue;
    }
    for (auto& part : meeting->second) Machine::get().finish(part.kernel->end, 0);
    meeting = meetings.erase(meeting);
  }
}

}  // namespace late
