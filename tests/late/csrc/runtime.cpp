// CUDA runtime calls that one-sided transports make, under CUDA's names, for late devices. Numbers are those of CUDA 13's headers
// (driver_types.h). The driver's memory is shared memory, so that another process can open it by its handle. At its end is a counter
// that CUDA does not show: how often the memory is open. See runtime.h.
#include "runtime.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>

#include "allocator.h"
#include "current.h"
#include "locked.h"
#include "machine.h"

namespace late {
namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kMemoryAllocation = 2, kInvalidDevice = 101, kHostMemoryAlreadyRegistered = 712,
              kHostMemoryNotRegistered = 713, kMapFailed = 205, kIllegalState = 401,
              kCaptureUnsupported = 900, kUnknown = 999;
constexpr int kVersion = 13000;
constexpr int kNeverWritten = 0xFF;
constexpr size_t kPageBytes = 4096;
// Bytes that a copy engine moves in one microsecond of the device.
constexpr double kBytesPerMicrosecond = 25000;

struct Handle {
  char raw[64];
};

struct Shared {
  int device;
  int descriptor;
  size_t nbytes;
};

struct Meaning {
  pid_t process;
  int descriptor;
  size_t nbytes;
};

thread_local int last_error = kSuccess;
std::mutex mutex;
std::map<void*, Shared> allocated, opened;

int result(int status) {
  if (status != kSuccess) last_error = status;
  return status;
}

bool within(const std::map<void*, Shared>& ranges, const void* address) {
  auto range = ranges.upper_bound(const_cast<void*>(address));
  if (range == ranges.begin()) return false;
  --range;
  return static_cast<const char*>(address) < static_cast<char*>(range->first) + range->second.nbytes;
}

// Whether a device can access the address by itself.
bool reachable(const void* address) {
  if (CachingAllocator::get().device_of(address) >= 0 || Locked::get().has(address)) return true;
  std::lock_guard<std::mutex> guard(mutex);
  return within(allocated, address) || within(opened, address);
}

size_t whole_pages(size_t nbytes) { return (nbytes + kPageBytes - 1) / kPageBytes * kPageBytes; }

size_t with_count(size_t nbytes) { return whole_pages(nbytes) + kPageBytes; }

// How often the memory is open in any process.
std::atomic<int>& times_open(void* address, size_t nbytes) {
  return *reinterpret_cast<std::atomic<int>*>(static_cast<char*>(address) + whole_pages(nbytes));
}

void* map(int descriptor, size_t nbytes) {
  void* address = mmap(nullptr, with_count(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  return address == MAP_FAILED ? nullptr : address;
}

int guarded(const std::function<int()>& call) {
  try {
    return result(call());
  } catch (const std::exception&) {
    return result(kUnknown);
  }
}

int copy_all(void* const* targets, const void* const* sources, const size_t* lengths, size_t number, int stream) {
  Operation copy;
  copy.label = "copy of " + std::to_string(number) + " pieces by the runtime";
  copy.copies = true;
  copy.cost = 1;
  std::vector<std::tuple<void*, const void*, size_t>> pieces;
  for (size_t i = 0; i < number; ++i) {
    if (!reachable(targets[i]) || !reachable(sources[i])) return kInvalidValue;
    pieces.emplace_back(targets[i], sources[i], lengths[i]);
    copy.cost += static_cast<double>(lengths[i]) / kBytesPerMicrosecond;
  }
  copy.run = [pieces] {
    for (auto& [target, source, nbytes] : pieces) std::memcpy(target, source, nbytes);
  };
  Machine::get().issue(current_device(), stream, std::move(copy));
  return kSuccess;
}

}  // namespace

Holding holding() {
  std::lock_guard<std::mutex> guard(mutex);
  return {allocated.size(), opened.size()};
}

}  // namespace late

#define EXPORTED extern "C" __attribute__((visibility("default")))
using namespace late;

EXPORTED int cudaRuntimeGetVersion(int* version) {
  *version = kVersion;
  return kSuccess;
}

EXPORTED int cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

EXPORTED int cudaGetLastError() {
  int error = last_error;
  last_error = kSuccess;
  return error;
}

EXPORTED const char* cudaGetErrorName(int status) {
  static const std::map<int, const char*> names = {
      {kSuccess, "cudaSuccess"},
      {kInvalidValue, "cudaErrorInvalidValue"},
      {kMemoryAllocation, "cudaErrorMemoryAllocation"},
      {kInvalidDevice, "cudaErrorInvalidDevice"},
      {kHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered"},
      {kHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered"},
      {kMapFailed, "cudaErrorMapBufferObjectFailed"},
      {kIllegalState, "cudaErrorIllegalState"},
      {kCaptureUnsupported, "cudaErrorStreamCaptureUnsupported"},
  };
  auto entry = names.find(status);
  return entry == names.end() ? "cudaErrorUnknown" : entry->second;
}

EXPORTED int cudaGetDevice(int* device) {
  *device = current_device();
  return kSuccess;
}

EXPORTED int cudaSetDevice(int device) {
  if (device < 0 || device >= Machine::get().devices()) return result(kInvalidDevice);
  set_current_device(device);
  return kSuccess;
}

EXPORTED int cudaStreamIsCapturing(void* stream, int* status) {
  *status = Machine::get().captures(current_device(), static_cast<int>(reinterpret_cast<intptr_t>(stream))) != nullptr;
  return kSuccess;
}

EXPORTED int cudaDeviceSynchronize() {
  return guarded([] {
    Machine::get().wait_device(current_device());
    return kSuccess;
  });
}

EXPORTED int cudaMemGetInfo(size_t* free, size_t* total) {
  std::tie(*free, *total) = CachingAllocator::get().getMemoryInfo(static_cast<c10::DeviceIndex>(current_device()));
  return kSuccess;
}

EXPORTED int cudaMalloc(void** result_address, size_t nbytes) {
  return guarded([=] {
    int device = current_device();
    // "potentially unsafe API calls", of which cudaMalloc is the guide's example: cudaStreamBeginCapture, CUDA Runtime API.
    if (Machine::get().captures(device)) return kCaptureUnsupported;
    if (Machine::get().lending_synchronizes) Machine::get().wait_device(device);
    if (!CachingAllocator::get().reserve(device, nbytes)) return kMemoryAllocation;
    int descriptor = memfd_create("late", MFD_CLOEXEC);
    void* address = descriptor >= 0 && !ftruncate(descriptor, static_cast<off_t>(with_count(nbytes))) ? map(descriptor, nbytes) : nullptr;
    if (!address) return kMemoryAllocation;
    std::memset(address, kNeverWritten, nbytes);
    std::lock_guard<std::mutex> guard(mutex);
    allocated[address] = {device, descriptor, nbytes};
    *result_address = address;
    return kSuccess;
  });
}

EXPORTED int cudaFree(void* address) {
  return guarded([=] {
    std::unique_lock<std::mutex> guard(mutex);
    auto allocation = allocated.find(address);
    if (allocation == allocated.end()) return kInvalidValue;
    Shared shared = allocation->second;
    // "Calling cudaFree on an exported memory region before calling cudaIpcCloseMemHandle in the importing context will result in undefined
    // behavior": cudaIpcOpenMemHandle, CUDA Runtime API.
    if (times_open(address, shared.nbytes) > 0) return kIllegalState;
    allocated.erase(allocation);
    guard.unlock();
    Machine::get().wait_device(shared.device);
    CachingAllocator::get().unreserve(shared.device, shared.nbytes);
    munmap(address, with_count(shared.nbytes));
    close(shared.descriptor);
    return kSuccess;
  });
}

EXPORTED int cudaIpcGetMemHandle(Handle* handle, void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto allocation = allocated.find(address);
  if (allocation == allocated.end()) return result(kInvalidValue);
  Meaning meaning{getpid(), allocation->second.descriptor, allocation->second.nbytes};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle->raw, &meaning, sizeof meaning);
  return kSuccess;
}

EXPORTED int cudaIpcOpenMemHandle(void** result_address, Handle handle, unsigned) {
  Meaning meaning;
  std::memcpy(&meaning, handle.raw, sizeof meaning);
  std::string path = "/proc/" + std::to_string(meaning.process) + "/fd/" + std::to_string(meaning.descriptor);
  int descriptor = open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* address = descriptor < 0 ? nullptr : map(descriptor, meaning.nbytes);
  if (!address) return result(kMapFailed);
  ++times_open(address, meaning.nbytes);
  std::lock_guard<std::mutex> guard(mutex);
  opened[address] = {current_device(), descriptor, meaning.nbytes};
  *result_address = address;
  return kSuccess;
}

EXPORTED int cudaIpcCloseMemHandle(void* address) {
  std::lock_guard<std::mutex> guard(mutex);
  auto mapping = opened.find(address);
  if (mapping == opened.end()) return result(kInvalidValue);
  --times_open(address, mapping->second.nbytes);
  munmap(address, with_count(mapping->second.nbytes));
  close(mapping->second.descriptor);
  opened.erase(mapping);
  return kSuccess;
}

EXPORTED int cudaHostRegister(void* address, size_t nbytes, unsigned) {
  if (Locked::get().has(address)) return result(kHostMemoryAlreadyRegistered);
  Locked::get().add(address, nbytes);
  return kSuccess;
}

EXPORTED int cudaHostUnregister(void* address) {
  return Locked::get().remove(address) ? kSuccess : result(kHostMemoryNotRegistered);
}

EXPORTED int cudaMemcpyAsync(void* target, const void* source, size_t nbytes, int, void* stream) {
  return guarded([=] { return copy_all(&target, &source, &nbytes, 1, static_cast<int>(reinterpret_cast<intptr_t>(stream))); });
}

EXPORTED int cudaMemcpyBatchAsync(void* const* targets, const void* const* sources, const size_t* lengths, size_t number, const void*,
                                  const size_t*, size_t, void* stream) {
  return guarded([=] {
    int id = static_cast<int>(reinterpret_cast<intptr_t>(stream));
    // "hStream must not be the legacy NULL stream": cudaMemcpyBatchAsync, CUDA Runtime API.
    if (!id) return kInvalidValue;
    // A graph has no node for it: release notes of cuda.core 1.2.
    return Machine::get().captures(current_device(), id) ? kCaptureUnsupported : copy_all(targets, sources, lengths, number, id);
  });
}
