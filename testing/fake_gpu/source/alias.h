// One memory under two devices: a CPU tensor on a device tensor's memory, and the other way round.
#pragma once

#include <ATen/core/Tensor.h>

namespace fake_gpu {

at::Tensor on_cpu(const at::Tensor& tensor);                       // t itself where it is the CPU's already
at::Tensor on_device(const at::Tensor& tensor, c10::Device device);  // of a CPU result that nobody else holds
void grow(const c10::Storage& storage, size_t bytes);              // keeps what is there

}  // namespace fake_gpu
