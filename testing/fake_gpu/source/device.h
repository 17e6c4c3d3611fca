// A "CUDA" device for torch: its memory is the host's, its kernels are the CPU's, its streams are in order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

namespace fake_gpu {

// ---- devices: as many as FAKE_GPUS says, less what CUDA_VISIBLE_DEVICES hides
int device_count();
void set_device_count(int count);
int current_device();
void set_device(int index);  // raises CUDA's "invalid device ordinal"
// As CUDA, it starts with the first device or memory that somebody asks for, and reads the allocator's settings then.
void start();
std::optional<std::string> allocator_settings();  // none before it has started

// ---- memory of all devices of this process, bytes
c10::Allocator* device_allocator();
c10::DataPtr adopt(c10::Storage storage, c10::Device device);  // the memory of a CPU storage, counted as the device's
bool is_pinned(const void* pointer);
int64_t allocated_bytes();
int64_t peak_bytes();
void reset_peak_bytes();

// ---- counts: where the host waits for the device, and what NCCL was asked
void wait(const std::string& why);
void count(const std::string& what);
std::map<std::string, int64_t> counts();
void reset_counts();
void on_wait(std::function<void(const std::string&)> callback);  // called at each wait, on the thread that waits

}  // namespace fake_gpu
