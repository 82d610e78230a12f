// A CUDA that does nothing, for any build of torch. With it, fake tensors may be on "cuda", and
// autograd runs their backward. tests/support/fake_cuda.py compiles and loads it.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr DeviceIndex DEVICES = 8;
static thread_local DeviceIndex current = 0;  // per thread and 0 at first, as in CUDA

namespace c10::impl {

struct FakeGuard final : public NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device exchangeDevice(Device device) const override {
    Device before(DeviceType::CUDA, current);
    current = device.index();
    return before;
  }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void** event, const Stream&, const DeviceIndex, const EventFlag) const override {
    *event = (void*)this;
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

C10_REGISTER_GUARD_IMPL(CUDA, FakeGuard)

}  // namespace c10::impl

namespace at {

struct CUDAHooks : public CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    DeviceIndex before = current;
    current = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// A CUDA build of torch has registered its own hooks already. At the same priority, the registry
// would exit; at a higher one, it replaces them.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks);

}  // namespace at

namespace c10d {

// In a CUDA build, DDP's own timer would record CUDA events.
struct NoTimer final : public Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(
    TimerRegistry, c10::DeviceType::CUDA, c10::REGISTRY_PREFERRED, NoTimer);

}  // namespace c10d
