// The order of operations that nothing orders: random by a seed, or directed to delay certain ones.
//
// CUDA promises order only within a stream and after events: "Operations in different streams may be interleaved and, when possible, they
// can even run concurrently" (CUDA C++ Best Practices Guide, asynchronous transfers).
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

  // Choose the operation that runs next. All of them may run.
  size_t choose(const std::vector<Choice>& choices);

  // A random number of operations that a device runs while the host continues: none with an eagerness of 0.
  int meanwhile();

  // Whether operations run only when they are waited for.
  bool as_late() const { return kind_ == Kind::kAsLate; }

  // A random number below `number`.
  size_t draw(size_t number) { return chance_() % number; }

 private:
  bool is_delayed(const Choice& choice) const;

  Kind kind_ = Kind::kDrawn;
  int stream_ = -1;
  double eagerness_ = 0;
  std::mt19937_64 chance_{0};
};

}  // namespace late
