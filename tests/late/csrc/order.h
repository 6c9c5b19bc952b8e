// In which order a device does what nothing orders: drawn by a seed, or directed against somebody.
//
// CUDA promises order within a stream and behind events, and nothing else: "Operations in different streams may be interleaved and,
// when possible, they can even run concurrently" (CUDA C++ Best Practices Guide, asynchronous transfers).
#pragma once
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace late {

struct Choice {
  int device;
  int stream;
  bool copies;
};

class Order {
 public:
  enum class Kind { kDrawn, kStreamLast, kCopiesLast, kComputeLast, kAsLate };

  void set(const std::string& kind, uint64_t seed, int stream, double eagerness);

  // Which of these runs next. All of them may.
  size_t choose(const std::vector<Choice>& choices);

  // How many operations a device does while the host goes on, by chance: none with an eagerness of 0.
  int meanwhile();

  // Nothing runs but what somebody waits for, and what that needs.
  bool as_late() const { return kind_ == Kind::kAsLate; }

  // Any of so many, for others that draw.
  size_t draw(size_t number) { return chance_() % number; }

 private:
  bool put_off(const Choice& choice) const;

  Kind kind_ = Kind::kDrawn;
  int stream_ = -1;
  double eagerness_ = 0;
  std::mt19937_64 chance_{0};
};

}  // namespace late
