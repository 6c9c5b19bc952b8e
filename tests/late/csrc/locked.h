// Host memory with locked pages (cudaHostRegister), which a device copies to and from by itself while the host continues.
#pragma once
#include <map>
#include <mutex>

namespace late {

class Locked {
 public:
  static Locked& get() {
    static auto* locked = new Locked();
    return *locked;
  }
  void add(const void* address, size_t nbytes) {
    std::lock_guard<std::mutex> guard(mutex_);
    ranges_[static_cast<const char*>(address)] = nbytes;
  }
  bool remove(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    return ranges_.erase(static_cast<const char*>(address)) > 0;
  }
  void clear() {
    std::lock_guard<std::mutex> guard(mutex_);
    ranges_.clear();
  }
  bool has(const void* address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto range = ranges_.upper_bound(static_cast<const char*>(address));
    if (range == ranges_.begin()) return false;
    --range;
    return static_cast<const char*>(address) < range->first + range->second;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
};

}  // namespace late
