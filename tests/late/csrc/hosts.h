// The hosts of late devices: one thread per rank, only one of which runs at a time, chosen by the seed.
//
// So a run with several ranks in one process is reproducible, and a deadlock is detected without a clock. A process with one host needs
// none of this: it waits for its devices, and there is no other host. Nor do several processes, whose devices work by themselves
// (wire.h): only a clock can tell whether another process will ever come, and that is the watchdog's task.
//
// A host consists of its own thread and its device's autograd thread, and at the end of a backward both run for a moment. So a host may
// wait for two conditions at once, and continues when either holds; and the last one to wait must check again for a while before it
// reports a deadlock, because a thread may be running that is unknown here.
#pragma once
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

namespace late {

class Hosts {
 public:
  using Test = std::function<bool()>;

  static Hosts& get();

  // Expect this many threads to call `enter`; none continues before all have.
  void expect(int number);
  void enter(int host);
  void leave(int host);

  // Continue once `over` holds. Meanwhile the devices work (`go_on`, which returns whether anything could run), or another host does.
  // Throws in every host if none can continue.
  void wait_until(const Test& over, const Test& go_on, const std::string& what);
  // What each host waited for in a deadlock; empty if there was none.
  const std::string& stuck() const { return stuck_; }
  // Let another host run, if the seed says so.
  void perhaps_yield();

 private:
  struct Wait {
    const Test& over;
    const std::string& what;
  };
  struct Host {
    bool here = false;
    bool gone = false;
    std::vector<const Wait*> waits;

    bool can_go_on() const;
  };
  // The host that this thread acts for, or -1 if no hosts are expected or it acts for none.
  int acts_for() const;
  void wait_alone(const Test& over, const Test& go_on);
  bool hand_over(std::unique_lock<std::mutex>& lock);
  int another_that_can();
  void wait_for_turn(std::unique_lock<std::mutex>& lock, int me);
  std::string who_waits() const;

  std::mutex mutex_;
  std::condition_variable turned_;
  std::vector<Host> hosts_;
  int turn_ = -1;
  std::string stuck_;
};

}  // namespace late
