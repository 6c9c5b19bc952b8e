// See allocator.h.
#include "allocator.h"

#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include "current.h"

namespace late {
namespace {

// c10/core/AllocatorConfig.h and c10/cuda/CUDACachingAllocator.cpp.
constexpr size_t kMinBlockSize = 512;
constexpr size_t kSmallSize = 1 << 20;
constexpr size_t kSmallBuffer = 2 << 20;
constexpr size_t kMinLargeAlloc = 10 << 20;
constexpr size_t kLargeBuffer = 20 << 20;
constexpr size_t kRoundLarge = 2 << 20;
// Memory that was never written is NaN in every floating type.
constexpr int kNeverWritten = 0xFF;

size_t rounded(size_t nbytes) { return nbytes < kMinBlockSize ? kMinBlockSize : (nbytes + kMinBlockSize - 1) / kMinBlockSize * kMinBlockSize; }

size_t segment_size(size_t size) {
  if (size <= kSmallSize) return kSmallBuffer;
  if (size < kMinLargeAlloc) return kLargeBuffer;
  return (size + kRoundLarge - 1) / kRoundLarge * kRoundLarge;
}

bool worth_splitting(const Block& block, size_t size) {
  size_t rest = block.size - size;
  return block.small ? rest >= kMinBlockSize : rest > kSmallSize;
}

void free_block(void* address) { CachingAllocator::get().free(address); }

using Guard = std::lock_guard<std::recursive_mutex>;

std::recursive_mutex& mutex() { return Machine::get().mutex; }

void change(c10::CachingAllocator::Stat& stat, int64_t amount) {
  if (amount > 0) stat.increase(amount);
  if (amount < 0) stat.decrease(-amount);
}

}  // namespace

CachingAllocator& CachingAllocator::get() {
  static auto* allocator = new CachingAllocator();
  return *allocator;
}

static int registered = [] {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &CachingAllocator::get(), 1);
  return 0;
}();

bool CachingAllocator::Less::operator()(const Block* left, const Block* right) const {
  return std::tie(left->graph, left->stream, left->size, left->address) < std::tie(right->graph, right->stream, right->size, right->address);
}

void CachingAllocator::count(int device, int64_t allocated, int64_t requested, int64_t reserved, int64_t segments) {
  auto& stats = stats_[device];
  constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
  change(stats.allocated_bytes[all], allocated);
  change(stats.active_bytes[all], allocated);
  change(stats.allocation[all], (allocated > 0) - (allocated < 0));
  change(stats.requested_bytes[all], requested);
  change(stats.reserved_bytes[all], reserved);
  change(stats.segment[all], segments);
  stats.num_device_alloc += segments > 0;
  stats.num_device_free += segments < 0;
}

void CachingAllocator::reset(size_t capacity) {
  for (int device = 0; device < kMaxDevices; ++device) {
    Guard guard(mutex());
    // Blocks of a capture that never ended.
    for (Block* block : std::exchange(deferred_[device], {})) {
      block->used_on.clear();
      put_back(block);
    }
    wait_for_used(device);
    release_segments(device);
    resetPeakStats(device);
  }
  pool_bytes_.clear();
  capacity_ = capacity;
}

void* CachingAllocator::take_from_driver(int device, size_t nbytes) {
  // "cudaMalloc ... may implicitly synchronize": implicit synchronization, CUDA C++ Programming Guide.
  if (Machine::get().allocation_synchronizes && !Machine::get().captures(device)) Machine::get().wait_device(device);
  if (!reserve(device, nbytes)) return nullptr;
  void* address = std::aligned_alloc(kMinBlockSize, rounded(nbytes));
  TORCH_CHECK(address, "late: the host has no ", nbytes, " bytes for device ", device);
  std::memset(address, kNeverWritten, nbytes);
  return address;
}

bool CachingAllocator::reserve(int device, size_t nbytes) {
  Guard guard(mutex());
  if (driver_.at(device) + nbytes > capacity_) return false;
  driver_[device] += nbytes;
  return true;
}

void CachingAllocator::unreserve(int device, size_t nbytes) {
  Guard guard(mutex());
  driver_.at(device) -= nbytes;
}

void CachingAllocator::give_to_driver(int device, void* address, size_t nbytes) {
  // cudaFree waits for the device, too.
  Machine::get().wait_device(device);
  unreserve(device, nbytes);
  std::free(address);
}

Block* CachingAllocator::find(int device, int stream, bool small, size_t size, int graph) {
  Guard guard(mutex());
  // Events may not be queried in a capture.
  if (!Machine::get().captures(device)) reclaim_finished(device);
  Pool& pool = free_[device][small];
  Block key{device, stream, small, nullptr, size, graph};
  auto best = pool.lower_bound(&key);
  if (best == pool.end() || (*best)->stream != stream || (*best)->graph != graph) return nullptr;
  Block* block = *best;
  pool.erase(best);
  return block;
}

Block* CachingAllocator::new_segment(int device, int stream, bool small, size_t size, int graph) {
  size_t whole = segment_size(size);
  void* address = take_from_driver(device, whole);
  if (!address && !Machine::get().captures(device)) {
    // As torch does when out of memory: release cached, unused memory and try once more.
    wait_for_used(device);
    release_segments(device);
    address = take_from_driver(device, whole);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, address, "late device ", device, " out of memory: tried to allocate ", size, " bytes, and of ", capacity_,
                   " are taken ", driver_[device]);
  Guard guard(mutex());
  auto block = std::make_unique<Block>(Block{device, stream, small, static_cast<char*>(address), whole, graph});
  if (graph) pool_bytes_[graph] += whole;
  count(device, 0, 0, static_cast<int64_t>(whole), 1);
  return (blocks_[address] = std::move(block)).get();
}

void CachingAllocator::split(Block* block, size_t size) {
  if (!worth_splitting(*block, size)) return;
  auto rest = std::make_unique<Block>(Block{block->device, block->stream, block->small, block->address + size, block->size - size, block->graph});
  rest->previous = block;
  rest->next = block->next;
  if (rest->next) rest->next->previous = rest.get();
  block->next = rest.get();
  block->size = size;
  pool_of(*rest).insert(rest.get());
  blocks_[rest->address] = std::move(rest);
}

at::DataPtr CachingAllocator::allocate(size_t nbytes) {
  int device = current_device();
  c10::Device result_device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  if (!nbytes) return {nullptr, nullptr, &free_block, result_device};
  size_t size = rounded(nbytes);
  bool small = size <= kSmallSize;
  int stream = current_stream(device);
  // A capture allocates from its own pool: CUDACachingAllocator.cpp, beginAllocateToPool.
  Graph* capturing = Machine::get().captures(device, stream);
  int graph = capturing ? capturing->number : 0;
  Block* block = find(device, stream, small, size, graph);
  if (!block) block = new_segment(device, stream, small, size, graph);
  Guard guard(mutex());
  split(block, size);
  block->allocated = true;
  block->requested = nbytes;
  count(device, static_cast<int64_t>(block->size), static_cast<int64_t>(nbytes), 0, 0);
  return {block->address, block->address, &free_block, result_device};
}

c10::DeleterFnPtr CachingAllocator::raw_deleter() const { return &free_block; }

void CachingAllocator::copy_data(void* to, const void* from, size_t nbytes) const {
  Machine::get().wait_device(current_device());
  std::memcpy(to, from, nbytes);
}

void CachingAllocator::free(void* address) {
  Guard guard(mutex());
  auto entry = blocks_.find(address);
  if (entry == blocks_.end()) return;
  Block* block = entry->second.get();
  block->allocated = false;
  count(block->device, -static_cast<int64_t>(block->size), -static_cast<int64_t>(block->requested), 0, 0);
  if (block->used_on.empty()) {
    put_back(block);
    return;
  }
  // torch's needs_events_deferred_until_no_capture.
  if (Machine::get().captures(block->device)) {
    deferred_[block->device].push_back(block);
    return;
  }
  // torch's insert_events: the block is free once those streams have finished the work that they have now.
  for (int stream : block->used_on) block->until.push_back(Machine::get().mark(block->device, stream, "end of use of freed memory"));
  block->used_on.clear();
  waiting_[block->device].push_back(block);
}

void CachingAllocator::ended_capture(int device) {
  Guard guard(mutex());
  for (Block* block : std::exchange(deferred_[device], {})) {
    for (int stream : block->used_on) block->until.push_back(Machine::get().mark(device, stream, "end of use of freed memory"));
    block->used_on.clear();
    waiting_[device].push_back(block);
  }
}

void CachingAllocator::put_back(Block* block) {
  for (Block* neighbour : {block->previous, block->next})
    if (neighbour && !neighbour->allocated && neighbour->until.empty() && neighbour->used_on.empty()) merge(block, neighbour);
  pool_of(*block).insert(block);
}

void CachingAllocator::merge(Block* block, Block* neighbour) {
  pool_of(*neighbour).erase(neighbour);
  const void* old_address = neighbour->address;
  if (neighbour == block->previous) {
    // The merged block has the earlier address, so its entry takes this block over.
    block->previous = neighbour->previous;
    if (block->previous) block->previous->next = block;
    auto own = std::move(blocks_.at(block->address));
    blocks_.erase(block->address);
    block->address = neighbour->address;
    block->size += neighbour->size;
    blocks_[old_address] = std::move(own);
    return;
  }
  block->next = neighbour->next;
  if (block->next) block->next->previous = block;
  block->size += neighbour->size;
  blocks_.erase(old_address);
}

void CachingAllocator::reclaim_finished(int device) {
  auto& waiting = waiting_[device];
  for (size_t i = 0; i < waiting.size();) {
    bool over = true;
    for (auto& ending : waiting[i]->until) over &= ending->over;
    if (!over) {
      ++i;
      continue;
    }
    Block* block = waiting[i];
    waiting.erase(waiting.begin() + static_cast<long>(i));
    block->until.clear();
    put_back(block);
  }
}

void CachingAllocator::wait_for_used(int device) {
  std::vector<Ending> endings;
  {
    Guard guard(mutex());
    for (Block* block : waiting_[device]) endings.insert(endings.end(), block->until.begin(), block->until.end());
  }
  for (auto& ending : endings) Machine::get().wait(ending);
  Guard guard(mutex());
  reclaim_finished(device);
}

void CachingAllocator::release_segments(int device) {
  for (auto& pool : free_[device]) {
    std::vector<Block*> whole;
    {
      Guard guard(mutex());
      for (Block* block : pool)
        // A graph's memory stays reserved for it.
        if (!block->previous && !block->next && !Machine::get().has_graph(block->graph)) whole.push_back(block);
      for (Block* block : whole) pool.erase(block);
    }
    for (Block* block : whole) {
      give_to_driver(device, block->address, block->size);
      Guard guard(mutex());
      count(device, 0, 0, -static_cast<int64_t>(block->size), -1);
      blocks_.erase(block->address);
    }
  }
}

void CachingAllocator::emptyCache(c10::MempoolId_t) {
  for (int device = 0; device < Machine::get().devices(); ++device) {
    wait_for_used(device);
    release_segments(device);
  }
}

void CachingAllocator::recordStream(const c10::DataPtr& pointer, c10::Stream stream) {
  Guard guard(mutex());
  auto entry = blocks_.find(pointer.get());
  // "the stream that it was allocated on needs no event": recordStream of CUDACachingAllocator.cpp.
  if (entry != blocks_.end() && entry->second->stream != stream.id()) entry->second->used_on.insert(static_cast<int>(stream.id()));
}

int CachingAllocator::device_of(const void* address) {
  Guard guard(mutex());
  auto entry = blocks_.upper_bound(address);
  if (entry == blocks_.begin()) return -1;
  Block& block = *(--entry)->second;
  return address < block.address + block.size ? block.device : -1;
}

c10::CachingDeviceAllocator::DeviceStats CachingAllocator::getDeviceStats(c10::DeviceIndex device) {
  Guard guard(mutex());
  return stats_.at(device);
}

void CachingAllocator::resetAccumulatedStats(c10::DeviceIndex device) {
  Guard guard(mutex());
  auto& stats = stats_.at(device);
  for (auto* stat_array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes, &stats.requested_bytes})
    for (auto& stat : *stat_array) stat.reset_accumulated();
  stats.num_device_alloc = stats.num_device_free = 0;
}

void CachingAllocator::resetPeakStats(c10::DeviceIndex device) {
  Guard guard(mutex());
  auto& stats = stats_.at(device);
  for (auto* stat_array : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes, &stats.requested_bytes})
    for (auto& stat : *stat_array) stat.reset_peak();
}

std::pair<size_t, size_t> CachingAllocator::getMemoryInfo(c10::DeviceIndex device) {
  Guard guard(mutex());
  return {capacity_ - driver_.at(device), capacity_};
}

}  // namespace late
