// What torch asks of an accelerator as a whole: how many devices, whose memory, and storages that change their size.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "allocator.h"
#include "current.h"
#include "locked.h"
#include "machine.h"

namespace late {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(Machine::get().devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* address) const override { return Locked::get().has(address); }
  at::Device getDeviceFromPtr(void* address) const override {
    return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(CachingAllocator::get().device_of(address))};
  }

  // As resize_bytes_cuda does (aten/src/ATen/native/cuda/Resize.cpp): new memory of the current stream's pool, the old copied on it.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* known = storage.unsafeGetStorageImpl();
    if (!nbytes) {
      known->set_data_ptr_noswap(at::DataPtr(nullptr, known->device()));
      known->set_nbytes(0);
      return;
    }
    c10::DeviceIndex before = exchangeDevice(known->device().index());
    at::DataPtr fresh = CachingAllocator::get().allocate(nbytes);
    size_t kept = std::min(nbytes, known->nbytes());
    if (kept) {
      Operation copy;
      copy.label = "copy of what is resized";
      copy.run = [to = fresh.get(), from = known->data(), kept] { std::memcpy(to, from, kept); };
      Machine::get().issue(current_device(), current_stream(current_device()), std::move(copy));
    }
    known->set_data_ptr_noswap(std::move(fresh));
    known->set_nbytes(nbytes);
    set_current_device(before);
  }
};

int registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return 0;
}();

}  // namespace
}  // namespace late
