// A device over host memory: the parts that PyTorch needs of a backend in its open slot (PrivateUse1).
//
// Tensors of this device cannot be mixed with tensors of the CPU, as on hardware. Operators that only
// compute go through PyTorch's own fallback to the CPU; operators that allocate, view and move memory
// cannot, and are here. As on hardware without a generator, no random numbers are drawn on the device.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
const c10::Device kOnly(kDevice, 0);

// ---- memory

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes ? bytes : 1);
    TORCH_CHECK(data, "out of memory: ", bytes, " bytes");
    return {data, data, &std::free, kOnly};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(kDevice, &memory)

// ---- the device: there is a single device, and its work is finished when a call returns

struct Guard final : c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device exchangeDevice(c10::Device) const override { return kOnly; }
  c10::Device getDevice() const override { return kOnly; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void synchronizeDevice(c10::DeviceIndex) const override {}

 private:
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kOnly); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Numbers final : at::CPUGeneratorImpl {
  Numbers() { device_ = kOnly; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  at::Device getDeviceFromPtr(void*) const override { return kOnly; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetAllocator(c10::DeviceType::CPU);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const auto numbers = at::make_generator<Numbers>();
    return numbers;
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Numbers>();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto fresh = memory.allocate(bytes);
    std::memcpy(fresh.get(), storage.data(), std::min(bytes, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(fresh));
    storage.set_nbytes(bytes);
  }
};

// ---- operators that allocate, view and move memory

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &memory, kKeys, c10::dtype_or_default(dtype));
}

// Returns a tensor of the CPU over the same bytes.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}

at::Scalar read_scalar(const at::Tensor& tensor) {
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

// How many operators ran by the fallback.
int64_t fallbacks = 0;

void on_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++fallbacks;
  at::native::cpu_fallback(op, stack);
}

void no_draws(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(), ": this device has no generator; draw on the host");
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("resize_", at::native::resize_);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", read_scalar);
  for (const char* draw : {
           "bernoulli", "bernoulli_.float", "bernoulli_.Tensor", "exponential_", "geometric_",
           "multinomial", "native_dropout", "normal_", "random_", "random_.from", "random_.to",
           "randperm.generator_out", "uniform_"}) {
    m.impl(draw, torch::CppFunction::makeFromBoxedFunction<&no_draws>());
  }
}

// ---- autocast

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(scaled_dot_product_attention, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(softmax, int, fp32)
  KERNEL_PRIVATEUSEONE(log_softmax, int, fp32)
}

// ---- functions for Python

TORCH_LIBRARY(neuron_over_host, m) {
  m.def("register() -> ()", [] { at::RegisterPrivateUse1HooksInterface(new Hooks); });
  m.def("fallbacks() -> int", [] { return fallbacks; });
  m.def("seed(int seed) -> ()", [](int64_t seed) {
    at::detail::getPrivateUse1Hooks().getDefaultGenerator(0).get<at::CPUGeneratorImpl>()->set_current_seed(seed);
  });
  m.def("get_state() -> Tensor", [] {
    return at::Tensor(at::detail::getPrivateUse1Hooks().getDefaultGenerator(0).unsafeGetGeneratorImpl()->get_state());
  });
  m.def("set_state(Tensor state) -> ()", [](const at::Tensor& state) {
    at::detail::getPrivateUse1Hooks().getDefaultGenerator(0).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
  });
}

}  // namespace
