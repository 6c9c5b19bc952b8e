// See order.h.
#include "order.h"

#include "machine.h"

#include <map>
#include <stdexcept>

namespace late {

void Order::set(const std::string& kind, uint64_t seed, int stream, double eagerness) {
  static const std::map<std::string, Kind> kinds = {
      {"drawn", Kind::kDrawn},
      {"stream last", Kind::kStreamLast},
      {"copies last", Kind::kCopiesLast},
      {"compute last", Kind::kComputeLast},
      {"as late as can be", Kind::kAsLate},
  };
  auto entry = kinds.find(kind);
  if (entry == kinds.end()) throw std::invalid_argument("no order is called \"" + kind + "\"");
  kind_ = entry->second;
  chance_.seed(seed);
  stream_ = stream;
  eagerness_ = eagerness;
}

bool Order::is_delayed(const Choice& choice) const {
  switch (kind_) {
    case Kind::kStreamLast: return choice.stream % kReplays == stream_;
    case Kind::kCopiesLast: return choice.copies;
    case Kind::kComputeLast: return choice.stream % kReplays == 0;
    default: return false;
  }
}

size_t Order::choose(const std::vector<Choice>& choices) {
  std::vector<size_t> preferred;
  for (size_t i = 0; i < choices.size(); ++i)
    if (!is_delayed(choices[i])) preferred.push_back(i);
  return preferred.empty() ? draw(choices.size()) : preferred[draw(preferred.size())];
}

int Order::meanwhile() {
  int number = 0;
  while (number < 64 && (chance_() >> 11) * 0x1.0p-53 < eagerness_) ++number;
  return number;
}

}  // namespace late
