// The hosts of late devices: one thread a rank, of which one at a time goes on, whichever the seed says.
//
// So a run with several ranks in one process repeats, and "everybody waits" is known and not guessed by a clock. A process with one host
// needs none of this: it waits for its devices, or there is nobody to wait for. Nor does one of several processes, whose devices work by
// themselves (wire.h): whether another one ever comes only a clock can say, and that is the watchdog's.
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

  // So many threads are about to call `enter`; none goes on before all have.
  void expect(int number);
  void enter(int host);
  void leave(int host);

  // Go on once `over` holds. Meanwhile the devices work (`go_on`, which says whether anything could), or another host does.
  // Throws, in every host, where nobody can.
  void wait_until(const Test& over, const Test& go_on, const std::string& what);
  // Who waited for what when nobody could go on; empty where that never was.
  const std::string& stuck() const { return stuck_; }
  // Let another host go on, if the seed says so.
  void perhaps_yield();

 private:
  struct Host {
    bool here = false;
    bool gone = false;
    const Test* waits_for = nullptr;
    std::string what;
  };
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
