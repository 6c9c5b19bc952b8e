// See hosts.h.
#include "hosts.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "machine.h"
#include "wire.h"

namespace late {
namespace {

// Nobody may keep Python's lock while another host goes on.
class WithoutPython {
 public:
  WithoutPython() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

// Whose thread this is; a device's thread of autograd has no number and acts for the host whose turn it is.
thread_local int own = -1;

// A thread that collects garbage, say: it frees what an earlier run made, whoever's turn it is now.
bool is_bystander() {
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return own < 0 && std::strncmp(name, "pt_autograd", 11) != 0;
}

}  // namespace

Hosts& Hosts::get() {
  static auto* hosts = new Hosts();
  return *hosts;
}

void Hosts::expect(int number) {
  std::lock_guard<std::mutex> lock(mutex_);
  hosts_.assign(number, {});
  turn_ = -1;
  stuck_.clear();
}

void Hosts::enter(int host) {
  WithoutPython without;
  own = host;
  std::unique_lock<std::mutex> lock(mutex_);
  hosts_.at(host).here = true;
  bool all = true;
  for (auto& each : hosts_) all &= each.here;
  if (all && turn_ < 0) {
    turn_ = static_cast<int>(Machine::get().order.draw(hosts_.size()));
    turned_.notify_all();
  }
  wait_for_turn(lock, host);
}

void Hosts::leave(int host) {
  WithoutPython without;
  own = -1;
  std::unique_lock<std::mutex> lock(mutex_);
  if (hosts_.empty()) return;
  hosts_.at(host).gone = true;
  if (std::all_of(hosts_.begin(), hosts_.end(), [](auto& each) { return each.gone; })) turn_ = -1;
  // The others' waits say themselves when nobody can go on.
  if (turn_ == host && !hand_over(lock)) {
    for (size_t other = 0; other < hosts_.size(); ++other)
      if (!hosts_[other].gone) turn_ = static_cast<int>(other);
    turned_.notify_all();
  }
}

int Hosts::another_that_can() {
  std::vector<int> able;
  for (size_t other = 0; other < hosts_.size(); ++other) {
    auto& host = hosts_[other];
    if (static_cast<int>(other) != turn_ && host.here && !host.gone && (!host.waits_for || (*host.waits_for)()))
      able.push_back(static_cast<int>(other));
  }
  return able.empty() ? -1 : able[Machine::get().order.draw(able.size())];
}

bool Hosts::hand_over(std::unique_lock<std::mutex>& lock) {
  int next = another_that_can();
  if (next < 0) return false;
  ++Machine::get().progress;
  turn_ = next;
  turned_.notify_all();
  return true;
}

void Hosts::wait_for_turn(std::unique_lock<std::mutex>& lock, int me) {
  turned_.wait(lock, [&] { return turn_ == me || !stuck_.empty(); });
  TORCH_CHECK(stuck_.empty(), stuck_);
}

std::string Hosts::who_waits() const {
  std::string text;
  for (size_t host = 0; host < hosts_.size(); ++host) {
    auto& each = hosts_[host];
    text += "\n  host " + std::to_string(host) + ": ";
    text += each.gone ? "has left" : static_cast<int>(host) == turn_ && each.what.empty() ? "goes on" : each.what;
  }
  return text;
}

void Hosts::wait_until(const Test& over, const Test& go_on, const std::string& what) {
  WithoutPython without;
  if (works_by_itself()) return wait_alone(over, go_on);
  std::unique_lock<std::mutex> lock(mutex_);
  if (turn_ >= 0 && is_bystander()) {
    lock.unlock();
    return wait_alone(over, [] { return false; });
  }
  int me = turn_;
  if (me >= 0) {
    hosts_[me].waits_for = &over;
    hosts_[me].what = what;
  }
  auto forget = [&](void*) {
    if (me >= 0 && me < static_cast<int>(hosts_.size())) {
      hosts_[me].waits_for = nullptr;
      hosts_[me].what.clear();
    }
  };
  std::unique_ptr<void, decltype(forget)> at_the_end(this, forget);
  while (!over()) {
    TORCH_CHECK(stuck_.empty(), stuck_);
    bool elsewhere = me >= 0 && Machine::get().order.draw(4) == 0 && hand_over(lock);
    if (!elsewhere && go_on()) continue;
    if (!elsewhere && me >= 0) elsewhere = hand_over(lock);
    if (!elsewhere) {
      std::string text = "late: nobody can go on: " + what + "." + who_waits() + Machine::get().standing();
      if (me >= 0) {
        stuck_ = text;
        turned_.notify_all();
      }
      TORCH_CHECK(false, text);
    }
    wait_for_turn(lock, me);
  }
}

void Hosts::wait_alone(const Test& over, const Test& go_on) {
  while (!over()) {
    host_is_here();
    {
      std::lock_guard<std::recursive_mutex> guard(Machine::get().mutex);
      TORCH_CHECK(Machine::get().failed.empty(), Machine::get().failed);
    }
    if (!go_on()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void Hosts::perhaps_yield() {
  WithoutPython without;
  std::unique_lock<std::mutex> lock(mutex_);
  int me = turn_;
  if (me < 0 || Machine::get().order.draw(2) || !hand_over(lock)) return;
  wait_for_turn(lock, me);
}

}  // namespace late
