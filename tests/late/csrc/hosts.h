// The hosts of late devices: one thread a rank, of which one at a time goes on, whichever the seed says.
//
// So a run with several ranks in one process repeats, and "everybody waits" is known and not guessed by a clock. A process with one host
// needs none of this: it waits for its devices, or there is nobody to wait for. Nor does one of several processes, whose devices work by
// themselves (wire.h): whether another one ever comes only a clock can say, and that is the watchdog's.
//
// A host is its own thread and its device's thread of autograd, and for a moment at the end of a backward both run. So a host may wait for
// two things at once, and goes on once either is over; and what waits last may not say that nobody can go on before it has asked again for
// a while: somebody may be running of whom nothing is known here.
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
  // The host that this thread acts for, or -1: nobody is expected, or it acts for none.
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
