// See hosts.h.
#include "hosts.h"

#include <Python.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <thread>

#include "machine.h"
#include "wire.h"

namespace late {
namespace {

// No host may hold Python's lock while another one runs.
class WithoutPython {
 public:
  WithoutPython() : state_(PyGILState_Check() ? PyEval_SaveThread() : nullptr) {}
  ~WithoutPython() {
    if (state_) PyEval_RestoreThread(state_);
  }

 private:
  PyThreadState* state_;
};

// The host of this thread.
thread_local int own = -1;

// How often a wait checks again, and how long it sleeps in between, before it reports a deadlock.
constexpr int kAskedAgain = 20;
constexpr auto kBetween = std::chrono::milliseconds(10);

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
  turned_.notify_all();
}

int Hosts::acts_for() const {
  if (hosts_.empty()) return -1;
  int host = own;
  if (host < 0) {
    char name[16] = "";
    pthread_getname_np(pthread_self(), name, sizeof(name));
    // Torch names its threads so; host k has device k.
    if (std::sscanf(name, "pt_autograd_%d", &host) != 1) return -1;
  }
  return host < static_cast<int>(hosts_.size()) && hosts_[host].here && !hosts_[host].gone ? host : -1;
}

bool Hosts::Host::can_go_on() const {
  return here && !gone && (waits.empty() || std::any_of(waits.begin(), waits.end(), [](auto* wait) { return wait->over(); }));
}

void Hosts::enter(int host) {
  WithoutPython without;
  own = host;
  std::unique_lock<std::mutex> lock(mutex_);
  hosts_.at(host).here = true;
  bool all = true;
  for (auto& host_state : hosts_) all &= host_state.here;
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
  if (std::all_of(hosts_.begin(), hosts_.end(), [](auto& host_state) { return host_state.gone; })) turn_ = -1;
  // The waits of the other hosts report a deadlock.
  if (turn_ == host && !hand_over(lock)) {
    for (size_t other = 0; other < hosts_.size(); ++other)
      if (!hosts_[other].gone) turn_ = static_cast<int>(other);
  }
  turned_.notify_all();
}

int Hosts::another_that_can() {
  std::vector<int> able;
  for (size_t other = 0; other < hosts_.size(); ++other)
    if (static_cast<int>(other) != turn_ && hosts_[other].can_go_on()) able.push_back(static_cast<int>(other));
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
  // A host that has left has no turn; its device's thread may still be cleaning up.
  turned_.wait(lock, [&] { return turn_ == me || !stuck_.empty() || acts_for() != me; });
  TORCH_CHECK(stuck_.empty(), stuck_);
}

std::string Hosts::who_waits() const {
  std::string text;
  for (size_t host = 0; host < hosts_.size(); ++host) {
    auto& state = hosts_[host];
    text += "\n  host " + std::to_string(host) + ": ";
    if (state.gone) text += "has left";
    else if (state.waits.empty()) text += "goes on";
    for (auto* wait : state.waits) text += (wait == state.waits.front() ? "" : "; ") + wait->what;
  }
  return text;
}

void Hosts::wait_until(const Test& over, const Test& go_on, const std::string& what) {
  WithoutPython without;
  if (works_by_itself()) return wait_alone(over, go_on);
  std::unique_lock<std::mutex> lock(mutex_);
  const int me = acts_for();
  if (me < 0 && turn_ >= 0) {
    // For example a garbage collector's thread, which frees memory of an earlier run during another host's turn.
    lock.unlock();
    return wait_alone(over, [] { return false; });
  }
  Wait wait{over, what};
  if (me >= 0) hosts_[me].waits.push_back(&wait);
  auto forget = [&](void*) {
    if (me >= 0 && me < static_cast<int>(hosts_.size())) std::erase(hosts_[me].waits, &wait);
  };
  std::unique_ptr<void, decltype(forget)> at_the_end(this, forget);
  int asked_again = 0;
  while (!over()) {
    TORCH_CHECK(stuck_.empty(), stuck_);
    if (me >= 0 && acts_for() != me) {
      lock.unlock();
      wait_alone(over, [] { return false; });
      lock.lock();
      return;
    }
    if (me >= 0 && turn_ != me) {
      wait_for_turn(lock, me);
      continue;
    }
    bool elsewhere = me >= 0 && Machine::get().order.draw(4) == 0 && hand_over(lock);
    if (!elsewhere && go_on()) {
      asked_again = 0;
      continue;
    }
    if (!elsewhere && me >= 0) elsewhere = hand_over(lock);
    if (elsewhere) {
      asked_again = 0;
      continue;
    }
    if (asked_again++ < kAskedAgain) {
      lock.unlock();
      std::this_thread::sleep_for(kBetween);
      lock.lock();
      continue;
    }
    std::string text = "late: nobody can go on: " + what + "." + who_waits() + Machine::get().standing();
    if (me >= 0) {
      stuck_ = text;
      turned_.notify_all();
    }
    TORCH_CHECK(false, text);
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
  const int me = acts_for();
  if (me < 0 || turn_ != me || Machine::get().order.draw(2) || !hand_over(lock)) return;
  wait_for_turn(lock, me);
}

}  // namespace late
