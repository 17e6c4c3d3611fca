// Every operator on a device tensor: the CPU's kernel on the same memory. What mixes devices raises as CUDA does.
#include "alias.h"
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_log_softmax.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/_softmax.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

namespace fake_gpu {
using at::Tensor;

namespace {

Tensor same_memory(const Tensor& tensor, c10::DataPtr memory, c10::DispatchKey key) {
  auto bytes = c10::StorageImpl::use_byte_size_t();
  auto device = memory.device().type();
  c10::Storage storage(c10::make_intrusive<c10::StorageImpl>(
      bytes, tensor.storage().nbytes(), std::move(memory), c10::GetAllocator(device), /*resizable=*/true));
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  return alias;
}

}  // namespace

Tensor on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto storage = tensor.storage();
  void* memory = storage.mutable_data();
  auto release = [](void* context) { delete static_cast<c10::Storage*>(context); };
  return same_memory(
      tensor, c10::DataPtr(memory, new c10::Storage(std::move(storage)), release, at::kCPU), c10::DispatchKey::CPU);
}

Tensor on_device(const Tensor& tensor, c10::Device device) {
  return same_memory(tensor, adopt(tensor.storage(), device), c10::DispatchKey::CUDA);
}

void grow(const c10::Storage& storage, size_t bytes) {
  if (storage.nbytes() >= bytes) return;
  c10::DeviceGuard guard(storage.device());
  auto memory = device_allocator()->allocate(bytes);
  if (storage.nbytes() && storage.data()) std::memcpy(memory.get(), storage.data(), storage.nbytes());
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

namespace {

bool begins_with_one_of(std::string_view name, std::initializer_list<std::string_view> beginnings) {
  return std::any_of(beginnings.begin(), beginnings.end(), [&](auto each) { return name.substr(0, each.size()) == each; });
}

// ---- operators that ATen's CUDA part has as kernels of its own -------------------------------------------------------
c10::Device chosen(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : c10::Device(at::kCUDA, static_cast<c10::DeviceIndex>(current_device()));
}
at::ScalarType chosen(std::optional<at::ScalarType> dtype) {
  return dtype ? *dtype : at::typeMetaToScalarType(at::get_default_dtype());
}
const c10::DispatchKeySet DEVICE_KEY(c10::DispatchKey::CUDA);

Tensor empty(c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), device_allocator(), DEVICE_KEY, chosen(dtype), format);
}

Tensor empty_strided(c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           device_allocator(), DEVICE_KEY, chosen(dtype));
}

// The host waits for a copy between it and the device, but for one that may go on: non_blocking, from or into pinned memory.
// cudaMemcpyAsync from memory that is not pinned returns when it has read all; into it, when it has written all.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_cuda() != source.is_cuda() && source.numel()) {
    bool to_host = source.is_cuda();
    const Tensor& host = to_host ? self : source;
    if (!non_blocking) {
      wait(to_host ? "copy to host" : "copy to device");
    } else if (to_host && !is_pinned(host.storage().data())) {
      wait("copy to host memory that is not pinned");
    }
  }
  on_cpu(self).copy_(on_cpu(source));
  return self;
}

at::Scalar item(const Tensor& self) {
  wait("item");
  return on_cpu(self).item();
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(sizes));
  grow(self.storage(), (self.storage_offset() + self.numel()) * self.itemsize());
  return self;
}

Tensor& set_view(Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), offset.expect_int());
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(source.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage storage) {
  int64_t elements = static_cast<int64_t>(storage.nbytes() / self.itemsize()), stride = 1;
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(at::IntArrayRef(elements), at::IntArrayRef(stride), 0);
  return self;
}

Tensor as_strided(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::SymInt> offset) {
  auto from = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), from);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef sizes) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes)); }
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}

void record_stream(Tensor&, c10::Stream) {}  // memory is released when nobody holds it, and by then nobody reads it

// CUDA's kernels take half precision and return fp32, which the CPU's refuse.
Tensor softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  auto cpu = half_to_float ? on_cpu(self).to(at::kFloat) : on_cpu(self);
  return on_device(at::_softmax(cpu, dim, false), self.device());
}
Tensor softmax_backward(const Tensor& gradient, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  auto result = at::_softmax_backward_data(on_cpu(gradient), on_cpu(output), dim, output.scalar_type());
  return on_device(result.to(dtype), output.device());
}
Tensor log_softmax(const Tensor& self, int64_t dim, bool half_to_float) {
  auto cpu = half_to_float ? on_cpu(self).to(at::kFloat) : on_cpu(self);
  return on_device(at::_log_softmax(cpu, dim, false), self.device());
}
Tensor log_softmax_backward(const Tensor& gradient, const Tensor& output, int64_t dim, at::ScalarType dtype) {
  auto result = at::_log_softmax_backward_data(on_cpu(gradient), on_cpu(output), dim, output.scalar_type());
  return on_device(result.to(dtype), output.device());
}

// CUDA's kernel counts integers too.
Tensor histc(const Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  auto cpu = on_cpu(self);
  if (!at::isIntegralType(cpu.scalar_type(), false)) return on_device(at::histc(cpu, bins, min, max), self.device());
  return on_device(at::histc(cpu.to(at::kDouble), bins, min, max).to(cpu.scalar_type()), self.device());
}

// SDPBackend::math: the one that is made of other operators.
int64_t sdpa_backend(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                     std::optional<double>, bool) {
  return 0;
}

// The device's view of an argument's memory that is the CPU's view `like` of it.
Tensor view_of(const Tensor& argument, const Tensor& like) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(argument.storage()), argument.key_set(), like.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) view._set_conj(true);
  if (like.is_neg()) view._set_neg(true);
  return view;
}

// ---- everything else -------------------------------------------------------------------------------------------------
bool takes_cpu_tensors(std::string_view name) {  // beside those of the device, as CUDA's kernels do
  return begins_with_one_of(name, {"aten::index.", "aten::index_put", "aten::_index_put", "aten::_unsafe_index", "aten::copy", "aten::set_"});
}

bool needs_result_on_host(std::string_view name) {  // how large its result is, the host knows only afterwards
  return begins_with_one_of(name, {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique", "aten::unique",
                                   "aten::bincount", "aten::repeat_interleave.Tensor"});
}

bool is_mask(const Tensor& tensor) { return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte; }

// One call of an operator: its arguments as the CPU's kernel sees them, its results as the device's.
struct Call {
  explicit Call(std::string operator_name) : name(std::move(operator_name)) {}

  std::string name;
  std::optional<c10::Device> device;
  Tensor from_cpu;                                  // an argument that is the CPU's and no scalar
  std::vector<std::pair<Tensor, Tensor>> arguments;  // on the device, and the same on the CPU
  std::vector<std::pair<Tensor, Tensor>> written;    // those of them that the operator writes into

  Tensor argument(const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      if (tensor.is_cpu() && tensor.dim()) from_cpu = tensor;
      return tensor;
    }
    TORCH_CHECK(!device || *device == tensor.device() || !tensor.dim() || takes_cpu_tensors(name),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                tensor.device(), "! (", name, ")");
    if (!device || tensor.dim()) device = tensor.device();
    auto& pair = arguments.emplace_back(tensor, on_cpu(tensor));
    if (is_written) written.push_back(pair);
    return pair.second;
  }

  c10::IValue argument(const c10::IValue& value, bool is_written) {
    if (value.isTensor()) return argument(value.toTensor(), is_written);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(argument(each, is_written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& each : value.toOptionalTensorVector()) {
        if (each && each->defined() && is_mask(*each)) wait(name + " by a mask");
        list.push_back(each ? std::optional<Tensor>(argument(*each, is_written)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      if (!device) device = value.toDevice();
      return c10::Device(at::kCPU);
    }
    return value;
  }

  void check_devices() const {
    TORCH_CHECK(!device || !from_cpu.defined() || takes_cpu_tensors(name),
                "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (",
                name, ", a CPU tensor of shape ", from_cpu.sizes(), ")");
  }

  // Where the operator gave an argument another size or other memory, the device's tensor gets the same.
  void write_back() const {
    for (const auto& [tensor, alias] : written) {
      if (alias.storage().data() == tensor.storage().data() && alias.sizes() == tensor.sizes()) continue;
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
      grow(tensor.storage(), alias.storage().nbytes());
      if (alias.storage().data() != tensor.storage().data())
        std::memcpy(tensor.storage().mutable_data(), alias.storage().data(), alias.storage().nbytes());
    }
  }

  Tensor result(const Tensor& tensor) const {
    if (!tensor.defined()) return tensor;
    for (const auto& [argument, alias] : arguments)
      if (alias.is_same(tensor)) return argument;
    for (const auto& [argument, alias] : arguments)  // a view of an argument stays one
      if (tensor.numel() && tensor.storage().data() == alias.storage().data()) return view_of(argument, tensor);
    return on_device(tensor, chosen(device));
  }

  c10::IValue result(const c10::IValue& value) const {
    if (value.isTensor()) return result(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<Tensor> list;
    for (const Tensor& each : value.toTensorVector()) list.push_back(result(each));
    return list;
  }
};

void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(c10::toString(op.operator_name()));
  size_t first = stack->size() - schema.arguments().size();
  for (size_t i = first; i < stack->size(); i++) {
    const auto* alias = schema.arguments()[i - first].alias_info();
    (*stack)[i] = call.argument((*stack)[i], alias && alias->isWrite());
  }
  call.check_devices();
  if (needs_result_on_host(call.name)) wait(call.name);
  c10::DeviceGuard guard(chosen(call.device));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) (*stack)[i] = call.result((*stack)[i]);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_local_scalar_dense", item);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_view);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_.source_Storage", set_storage);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", at::native::unfold);
  // They choose kernels by the tensors' device, and depthwise ones of CUDA's have no CPU kernel.
  for (const char* name : {"convolution", "convolution_backward"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  library.impl("record_stream", record_stream);
  library.impl("histc", histc);
  library.impl("_softmax", softmax);
  library.impl("_softmax_backward_data", softmax_backward);
  library.impl("_log_softmax", log_softmax);
  library.impl("_log_softmax_backward_data", log_softmax_backward);
  library.impl("_fused_sdp_choice", sdpa_backend);
}

}  // namespace
}  // namespace fake_gpu
