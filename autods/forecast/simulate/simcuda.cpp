// A CUDA device that does nothing: what torch needs beside Python's stubs so that autograd, FakeTensorMode and
// DeepSpeed's CUDA accelerator run without a GPU, on a CPU-only build of torch and on a CUDA build.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Device.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/PyInterpreter.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cstring>
#include <memory>
#if __has_include(<c10/core/impl/PyInterpreterHooks.h>)
#include <c10/core/impl/PyInterpreterHooks.h>
#endif

namespace {

// This process's card, and how many it sees.
c10::DeviceIndex current = 0;
c10::DeviceIndex count = 1;

c10::Device device() { return c10::Device(c10::DeviceType::CUDA, current); }

struct NoDeviceGuard final : public c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return device(); }
  Device getDevice() const override { return device(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return count; }
  void record(void**, const Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

struct NoDeviceHooks final : public at::CUDAHooksInterface {
  explicit NoDeviceHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  int getNumGPUs() const override { return count; }
  c10::DeviceIndex deviceCount() const override { return count; }
  c10::DeviceIndex current_device() const override { return current; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return current; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return current; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

// At loading, which must come before `import torch`; preferred over the hooks of a CUDA build, whose priority is the default.
const bool kHooks = [] {
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks",
      [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> {
        return std::make_unique<NoDeviceHooks>(args);
      },
      "",
      c10::REGISTRY_PREFERRED);
  return true;
}();

using Callbacks = c10::impl::PyInterpreterVTable;
using AskDevice = c10::Device (*)(const Callbacks*, const c10::TensorImpl*);
AskDevice ask_python = nullptr;

// The device of a fake tensor, which FakeTensor also writes into its dispatch keys. While a kernel runs for its shapes,
// it is the meta tensor that it holds. Other subclasses are asked in Python.
c10::Device device_of(const Callbacks* callbacks, const c10::TensorImpl* tensor) {
  const bool fake = tensor->has_storage() && tensor->unsafe_storage().device_type() == c10::DeviceType::Meta;
  if (!fake) return ask_python(callbacks, tensor);
  if (c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::Meta)) return c10::DeviceType::Meta;
  const auto keys = tensor->key_set();
  if (keys.has_backend(c10::BackendComponent::CUDABit)) return device();
  if (keys.has_backend(c10::BackendComponent::CPUBit)) return c10::DeviceType::CPU;
  return ask_python(callbacks, tensor);
}

}  // namespace

// After `import torch`: answer here for the device of a fake tensor. Python needs 5 µs for it, and torch asks several
// times an operator. False where this torch has no such callback, and Python goes on to answer.
extern "C" bool autods_answer_for_devices() {
  if (ask_python != nullptr) return true;
  const auto member = &Callbacks::device;
  std::ptrdiff_t place;  // a pointer to a virtual member holds its place in the table, plus one on x86-64
  std::memcpy(&place, &member, sizeof place);
  if (place % static_cast<std::ptrdiff_t>(sizeof(void*)) != 1) return false;
  char* table;
  std::memcpy(&table, c10::impl::getGlobalPyInterpreter()->vtable_, sizeof table);
  const auto slot = reinterpret_cast<AskDevice*>(table + place - 1);
  const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto page = reinterpret_cast<void*>(reinterpret_cast<std::uintptr_t>(slot) & ~(page_bytes - 1));
  if (mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
  ask_python = *slot;
  *slot = device_of;
  mprotect(page, page_bytes, PROT_READ);
  return true;
}

// After `import torch`, because a CUDA build puts in its own guard at import.
extern "C" void autods_register_guard() {
  // By the registrar's constructor: torch 2.9 has no registerDeviceGuard().
  c10::impl::DeviceGuardImplRegistrar(c10::DeviceType::CUDA, new NoDeviceGuard());
}

// A rank's card among those that it sees; forecasts have a single one.
extern "C" void autods_use_device(int index, int devices) {
  current = static_cast<c10::DeviceIndex>(index);
  count = static_cast<c10::DeviceIndex>(devices);
}
