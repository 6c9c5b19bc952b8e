// torch's interface for switching devices and streams, and for recording and waiting for events.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include "allocator.h"
#include "current.h"
#include "machine.h"

namespace late {
namespace {

thread_local int device_of_thread = 0;
thread_local std::array<int, kMaxDevices> stream_of_thread{};

struct Event {
  Ending ending;
  bool timed = false;
};

c10::Stream stream_of(c10::Device device, int id) { return c10::Stream(c10::Stream::UNSAFE, device, id); }

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

class DeviceGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }

  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {type(), static_cast<c10::DeviceIndex>(current_device())}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) device_of_thread = device.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(Machine::get().devices()); }

  c10::Stream getStream(c10::Device device) const override { return stream_of(whole(device), current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream_of(whole(device), 0); }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_of(whole(device), Machine::get().take_from_pool(index_of(device), priority < 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return getNewStream(device, high_priority ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), static_cast<int>(stream.id()));
    return before;
  }
  // The runtime's calls take streams by address, and 0 is the default stream, so the number itself serves as the handle.
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event();
    auto* recorded = static_cast<Event*>(*event);
    recorded->timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    recorded->ending = Machine::get().mark(stream.device_index(), static_cast<int>(stream.id()), "event");
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) Machine::get().block(stream.device_index(), static_cast<int>(stream.id()), static_cast<Event*>(event)->ending);
  }
  bool queryEvent(void* event) const override { return !event || Machine::get().query(static_cast<Event*>(event)->ending); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void synchronizeEvent(void* event) const override {
    if (event) Machine::get().wait(static_cast<Event*>(event)->ending);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto *from = static_cast<Event*>(first), *to = static_cast<Event*>(second);
    TORCH_CHECK(from->timed && to->timed, "late: both events have to be made with enable_timing=True");
    TORCH_CHECK(from->ending->over && to->ending->over, "late: both events have to be over before time between them is known");
    return (to->ending->time - from->ending->time) / 1e3;
  }

  bool queryStream(const c10::Stream& stream) const override {
    return Machine::get().query_stream(stream.device_index(), static_cast<int>(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Machine::get().wait_stream(stream.device_index(), static_cast<int>(stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { Machine::get().wait_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    CachingAllocator::get().recordStream(pointer, stream);
  }

 private:
  static c10::Device whole(c10::Device device) {
    return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index_of(device))};
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard);

}  // namespace

int current_device() { return device_of_thread; }

void set_current_device(int device) {
  TORCH_CHECK(0 <= device && device < Machine::get().devices(), "late: no device ", device, ", there are ", Machine::get().devices());
  device_of_thread = device;
}

int current_stream(int device) { return stream_of_thread.at(device); }

void set_current_stream(int device, int stream) { stream_of_thread.at(device) = stream; }

}  // namespace late
