// torch's interface to an accelerator: number of devices, owners of memory, and resizable storages.
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

  // As resize_bytes_cuda (aten/src/ATen/native/cuda/Resize.cpp): new memory of the current stream's pool, with a copy on that stream.
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    if (!nbytes) {
      impl->set_data_ptr_noswap(at::DataPtr(nullptr, impl->device()));
      impl->set_nbytes(0);
      return;
    }
    c10::DeviceIndex before = exchangeDevice(impl->device().index());
    at::DataPtr fresh = CachingAllocator::get().allocate(nbytes);
    size_t num_copied = std::min(nbytes, impl->nbytes());
    if (num_copied) {
      Operation copy;
      copy.label = "copy of a resized storage";
      copy.run = [to = fresh.get(), from = impl->data(), num_copied] { std::memcpy(to, from, num_copied); };
      Machine::get().issue(current_device(), current_stream(current_device()), std::move(copy));
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
    set_current_device(before);
  }
};

int registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return 0;
}();

}  // namespace
}  // namespace late
