// Late devices' memory: a caching allocator with one pool per stream, with the rules and sizes of torch's for CUDA.
//
// Freed memory is reused at once by the next allocation on the same stream, whatever still runs there, but never by another stream.
// c10/cuda/CUDACachingAllocator.cpp: "Once allocated to a stream, blocks are associated with it".
#pragma once
#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "machine.h"

namespace late {

struct Block {
  int device;
  int stream;
  bool small;
  char* address;
  size_t size;
  int graph = 0;  // The graph of its private pool; 0 for none.
  size_t requested = 0;
  bool allocated = false;
  // Neighbours in the same segment.
  Block* previous = nullptr;
  Block* next = nullptr;
  // Other streams that use it (record_stream), and, once it is freed, their positions at that moment.
  std::set<int> used_on;
  std::vector<Ending> until;
};

class CachingAllocator final : public c10::DeviceAllocator {
 public:
  static CachingAllocator& get();

  // Give every device this capacity, and reset the statistics.
  void reset(size_t capacity);
  // From now on, every device has this capacity, as if others used the rest.
  void limit(size_t capacity) { capacity_ = capacity; }
  size_t capacity() const { return capacity_; }

  // Memory of a device that is used outside of the cache; false if there is not enough.
  bool reserve(int device, size_t nbytes);
  void unreserve(int device, size_t nbytes);

  void free(void* address);
  // Blocks that were freed in the capture and used on other streams may be reused in its pool.
  void ended_capture(int device);
  // Bytes in the segments of a graph's private pool.
  size_t pool_bytes(int graph) const { return pool_bytes_.count(graph) ? pool_bytes_.at(graph) : 0; }
  // The device whose memory an address is in, or -1.
  int device_of(const void* address);

  // c10::Allocator
  at::DataPtr allocate(size_t nbytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t nbytes) const override;
  // c10::DeviceAllocator
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t pool = {0, 0}) override;
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetAccumulatedStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override;

 private:
  void* take_from_driver(int device, size_t nbytes);
  void give_to_driver(int device, void* address, size_t nbytes);
  struct Less {
    bool operator()(const Block* left, const Block* right) const;
  };
  using Pool = std::set<Block*, Less>;

  Pool& pool_of(const Block& block) { return free_[block.device][block.small]; }
  Block* find(int device, int stream, bool small, size_t size, int graph);
  Block* new_segment(int device, int stream, bool small, size_t size, int graph);
  void split(Block* block, size_t size);
  void put_back(Block* block);
  void merge(Block* block, Block* neighbour);
  void reclaim_finished(int device);
  void wait_for_used(int device);
  void release_segments(int device);
  void count(int device, int64_t allocated, int64_t requested, int64_t reserved, int64_t segments);

  size_t capacity_ = size_t(1) << 40;
  std::array<size_t, kMaxDevices> driver_{};
  std::map<const void*, std::unique_ptr<Block>> blocks_;
  std::array<std::array<Pool, 2>, kMaxDevices> free_;
  std::array<std::vector<Block*>, kMaxDevices> waiting_;
  std::array<std::vector<Block*>, kMaxDevices> deferred_;
  std::map<int, size_t> pool_bytes_;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kMaxDevices> stats_;
};

}  // namespace late
