// What torch asks of a driver: the number of devices, which is current, memory, streams and events.
// Loaded before torch's Python part, which asks the hooks once while it is imported and keeps the answer.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>

namespace fake_gpu {
namespace {

int visible_devices() {
  const char* installed = std::getenv("FAKE_GPUS");
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  int all = installed ? std::atoi(installed) : 1;
  if (!visible) return all;
  int found = 0;
  std::stringstream list(visible);
  for (std::string entry; std::getline(list, entry, ','); found++) {  // as CUDA's: what stands behind a wrong entry is hidden
    char* end = nullptr;
    long index = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || index < 0 || index >= all) break;
  }
  return found;
}

std::atomic<int> devices{visible_devices()};
thread_local int current = 0;
std::once_flag starts;
std::optional<std::string> settings;

// ---- memory --------------------------------------------------------------------------------------------------------
std::atomic<int64_t> allocated{0}, peak{0};

void took(int64_t bytes) {
  int64_t now = allocated += bytes, before = peak;
  while (now > before && !peak.compare_exchange_weak(before, now)) {
  }
}

struct Block {
  void* memory;
  int64_t bytes;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  c10::free_cpu(block->memory);
  allocated -= block->bytes;
  delete block;
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    start();
    auto* block = new Block{c10::alloc_cpu(bytes ? bytes : 1), static_cast<int64_t>(bytes)};
    took(bytes);
    return {bytes ? block->memory : nullptr, block, &release, c10::Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;

struct Adopted {
  c10::Storage storage;
  int64_t bytes;
};

void disown(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  allocated -= adopted->bytes;
  delete adopted;
}

// Pinned memory is the host's like any other. Which it is must be known: a copy from there does not wait.
std::mutex pinned_mutex;
std::map<uintptr_t, uintptr_t> pinned;  // first byte -> past the last

void unpin(void* memory) {
  {
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned.erase(reinterpret_cast<uintptr_t>(memory));
  }
  c10::free_cpu(memory);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = c10::alloc_cpu(bytes ? bytes : 1);
    auto first = reinterpret_cast<uintptr_t>(memory);
    std::lock_guard<std::mutex> lock(pinned_mutex);
    pinned[first] = first + (bytes ? bytes : 1);
    return {memory, memory, &unpin, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} pinned_allocator;

// ---- counts --------------------------------------------------------------------------------------------------------
std::mutex counts_mutex;
std::map<std::string, int64_t> counted;
std::function<void(const std::string&)> tell;

}  // namespace

int device_count() { return devices; }
void set_device_count(int count) { devices = count; }
void start() {
  std::call_once(starts, [] {
    const char* own = std::getenv("PYTORCH_CUDA_ALLOC_CONF");
    const char* any = std::getenv("PYTORCH_ALLOC_CONF");
    settings = own ? own : any ? any : "";
  });
}
std::optional<std::string> allocator_settings() { return settings; }
int current_device() {
  start();
  return current;
}
void set_device(int index) {
  start();
  TORCH_CHECK(index >= 0 && index < devices, "CUDA error: invalid device ordinal (", index, " of ", devices.load(), ")");
  current = index;
}

c10::Allocator* device_allocator() { return &allocator; }
c10::DataPtr adopt(c10::Storage storage, c10::Device device) {
  start();
  void* memory = storage.mutable_data();
  auto bytes = static_cast<int64_t>(storage.nbytes());
  took(bytes);
  return {memory, new Adopted{std::move(storage), bytes}, &disown, device};
}
bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> lock(pinned_mutex);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  return after != pinned.begin() && reinterpret_cast<uintptr_t>(pointer) < std::prev(after)->second;
}
int64_t allocated_bytes() { return allocated; }
int64_t peak_bytes() { return peak; }
void reset_peak_bytes() { peak = allocated.load(); }

void count(const std::string& what) {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counted[what]++;
}
void wait(const std::string& why) {
  count("wait: " + why);
  if (tell) tell(why);
}
std::map<std::string, int64_t> counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  return counted;
}
void reset_counts() {
  std::lock_guard<std::mutex> lock(counts_mutex);
  counted.clear();
}
void on_wait(std::function<void(const std::string&)> callback) { tell = std::move(callback); }

namespace {

// ---- devices, streams and events, for C++ and for torch.Stream and torch.Event ---------------------------------------
// Each operator has ended when it returns, so that a stream is always empty: only that somebody waited is of interest.
using Clock = std::chrono::steady_clock;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream only_stream(c10::Device device) {
    auto index = device.has_index() ? device.index() : static_cast<c10::DeviceIndex>(current);
    return c10::Stream(c10::Stream::DEFAULT, c10::Device(c10::kCUDA, index));
  }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return only_stream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return only_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return only_stream(stream.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("synchronize stream"); }
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Clock::time_point;
    *static_cast<Clock::time_point*>(*event) = Clock::now();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { wait("synchronize event"); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "Both events must be recorded before calculating elapsed time.");
    auto difference = *static_cast<Clock::time_point*>(second) - *static_cast<Clock::time_point*>(first);
    return std::chrono::duration<double, std::milli>(difference).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// The name is the one that torch looks for in the registry.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasCUDA() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex current_device() const override { return getCurrentDevice(); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  void setCurrentDevice(c10::DeviceIndex index) const override { set_device(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    set_device(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    auto before = getCurrentDevice();
    if (index >= 0) set_device(index);
    return before;
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {c10::kCUDA, getCurrentDevice()}; }
  void deviceSynchronize(c10::DeviceIndex) const override { wait("synchronize"); }
  // The CPU's kernels draw from the host's generator, so that a run has the dropout of the same run on the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<at::CPUGeneratorImpl>(); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

// A process that reads ahead is forked while another thread pins memory, and frees what it has inherited of it.
void lock_all() {
  pinned_mutex.lock();
  counts_mutex.lock();
}
void unlock_all() {
  counts_mutex.unlock();
  pinned_mutex.unlock();
}

const int registered = [] {
  c10::SetAllocator(c10::kCUDA, &allocator, 100);
  pthread_atfork(&lock_all, &unlock_all, &unlock_all);
  return 0;
}();

}  // namespace
}  // namespace fake_gpu

namespace c10d {
namespace {
// DDP's reducer measures itself by a timer of the device.
struct FakeTimer final : Timer {
  explicit FakeTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto first = getTimestamp(start), last = getTimestamp(end);
    if (!first || !last || *last < *first) return std::nullopt;
    return *last - *first;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, FakeTimer);
}  // namespace
}  // namespace c10d
