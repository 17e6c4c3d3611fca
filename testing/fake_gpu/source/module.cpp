// What Python sees of the device. The device itself is another library: it is there before torch is imported.
#include "alias.h"
#include "device.h"
#include "nccl.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

// A group of Gloo ends when its threads have, and they want the interpreter for the tensors that they give back: so whoever ends it
// lets go of the interpreter, as torch does for its own groups (IntrusivePtrNoGilDestructor).
template <typename T>
class Held {
 public:
  explicit Held(T* group) : group_(c10::intrusive_ptr<T>::unsafe_reclaim_from_nonowning(group)) {}
  explicit Held(c10::intrusive_ptr<T> group) : group_(std::move(group)) {}
  Held(const Held&) = default;
  Held(Held&&) noexcept = default;
  ~Held() {
    if (!group_ || !PyGILState_Check()) return;
    py::gil_scoped_release released;
    group_.reset();
  }
  T* get() const { return group_.get(); }

 private:
  c10::intrusive_ptr<T> group_;
};
PYBIND11_DECLARE_HOLDER_TYPE(T, Held<T>, true)

namespace {

void resize_storage(at::Storage storage, size_t bytes) {
  auto memory = fake_gpu::device_allocator()->allocate(bytes);
  size_t kept = std::min(bytes, storage.nbytes());
  if (kept && storage.data()) std::memcpy(memory.get(), storage.data(), kept);
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
  storage.set_nbytes(bytes);
}

void on_wait(py::object callback) {
  if (callback.is_none()) return fake_gpu::on_wait(nullptr);
  auto* held = callback.release().ptr();  // for as long as this process lives
  fake_gpu::on_wait([held](const std::string& why) {
    py::gil_scoped_acquire gil;
    auto* result = PyObject_CallFunction(held, "s", why.c_str());
    if (!result) PyErr_WriteUnraisable(held);
    Py_XDECREF(result);
  });
}

// The values of an int32 tensor, as a kernel on the device reads them: nobody waits.
std::vector<int32_t> peek(const at::Tensor& tensor) {
  auto values = fake_gpu::on_cpu(tensor).contiguous();
  return {values.data_ptr<int32_t>(), values.data_ptr<int32_t>() + values.numel()};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("device_count", &fake_gpu::device_count);
  module.def("set_device_count", &fake_gpu::set_device_count);
  module.def("current_device", &fake_gpu::current_device);
  module.def("set_device", &fake_gpu::set_device);
  module.def("start", &fake_gpu::start);
  module.def("allocator_settings", &fake_gpu::allocator_settings);
  module.def("allocated_bytes", &fake_gpu::allocated_bytes);
  module.def("peak_bytes", &fake_gpu::peak_bytes);
  module.def("reset_peak_bytes", &fake_gpu::reset_peak_bytes);
  module.def("peek", &peek);
  module.def("resize_storage", &resize_storage);
  module.def("wait", &fake_gpu::wait, py::call_guard<py::gil_scoped_release>());
  module.def("on_wait", &on_wait);
  module.def("counts", &fake_gpu::counts);
  module.def("reset_counts", &fake_gpu::reset_counts);
  auto backend = py::module_::import("torch._C._distributed_c10d").attr("Backend");
  py::class_<fake_gpu::NCCL, Held<fake_gpu::NCCL>>(module, "NCCL", backend)
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo) {
        return Held<fake_gpu::NCCL>(c10::make_intrusive<fake_gpu::NCCL>(std::move(store), std::move(gloo)));
      }));
}
