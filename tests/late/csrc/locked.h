// Host memory whose pages are locked (cudaHostRegister): a device copies to and from it by itself, and the host does not wait.
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
    auto found = ranges_.upper_bound(static_cast<const char*>(address));
    if (found == ranges_.begin()) return false;
    --found;
    return static_cast<const char*>(address) < found->first + found->second;
  }

 private:
  std::mutex mutex_;
  std::map<const char*, size_t> ranges_;
};

}  // namespace late
