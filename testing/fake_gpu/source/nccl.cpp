#include "nccl.h"

#include "alias.h"
#include "device.h"

#include <unistd.h>

#include <array>
#include <cstdlib>
#include <sstream>

namespace fake_gpu {

bool Batch::isCompleted() {
  for (auto& work : works)
    if (!work->isCompleted()) return false;
  return true;
}
bool Batch::wait(std::chrono::milliseconds timeout) {
  for (auto& work : works) work->wait(timeout);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> Collective::getFuture() {
  auto type = c10::ListType::create(c10::TensorType::get());
  auto future = c10::make_intrusive<c10::ivalue::Future>(type, std::vector<c10::Device>{results.at(0).device()});
  gloo->getFuture()->addCallback([future, results = results](c10::ivalue::Future& done) {
    if (done.hasError()) {
      future->setError(done.exception_ptr());
    } else {
      future->markCompleted(c10::IValue(results));
    }
  });
  return future;
}

NCCL::NCCL(c10::intrusive_ptr<c10d::Store> store, c10::intrusive_ptr<c10d::Backend> gloo)
    : Backend(gloo->getRank(), gloo->getSize()), store_(std::move(store)), gloo_(std::move(gloo)) {}

void NCCL::startCoalescing() { batch_ = c10::make_intrusive<Batch>(); }
WorkPtr NCCL::endCoalescing() { return std::exchange(batch_, nullptr); }
WorkPtr NCCL::keep(WorkPtr work) {
  if (batch_) batch_->works.push_back(work);
  return work;
}
WorkPtr NCCL::keep(WorkPtr work, const Tensors& results) {
  return keep(c10::make_intrusive<Collective>(std::move(work), results));
}

// ---- what NCCL refuses -----------------------------------------------------------------------------------------------
// The number of a device on its host, which CUDA_VISIBLE_DEVICES gives where a process sees only some.
std::string on_host(c10::Device device) {
  const char* visible = std::getenv("CUDA_VISIBLE_DEVICES");
  std::stringstream list(visible ? visible : "");
  std::string entry;
  for (int index = 0; std::getline(list, entry, ','); index++)
    if (index == device.index()) return entry;
  return std::to_string(device.index());
}

// As ncclCommInitRank at the first collective of a group: two ranks of a host on the same GPU are refused.
void NCCL::meet(c10::Device device) {
  if (std::exchange(met_, true)) return;
  std::array<char, 256> host{};
  gethostname(host.data(), host.size() - 1);
  std::string own = std::string(host.data()) + " cuda:" + on_host(device);
  store_->set("device of " + std::to_string(getRank()), std::vector<uint8_t>(own.begin(), own.end()));
  for (int rank = 0; rank < getSize(); rank++) {
    auto bytes = store_->get("device of " + std::to_string(rank));
    TORCH_CHECK(rank == getRank() || std::string(bytes.begin(), bytes.end()) != own,
                "NCCL error: invalid usage. Duplicate GPU detected : rank ", getRank(), " and rank ", rank,
                " both on CUDA device ", own);
  }
}

at::Tensor NCCL::checked(const at::Tensor& tensor, bool collective) {
  TORCH_CHECK(tensor.is_cuda() && !tensor.is_sparse(), "Tensors must be CUDA and dense");
  TORCH_CHECK(tensor.is_contiguous(tensor.suggest_memory_format()), "Tensors must be contiguous");
  if (collective) meet(tensor.device());
  return on_cpu(tensor);
}
Tensors NCCL::checked(const Tensors& tensors, bool collective) {
  Tensors found;
  for (const auto& tensor : tensors) found.push_back(checked(tensor, collective));
  return found;
}
TensorLists NCCL::checked(const TensorLists& lists) {
  TensorLists found;
  for (const auto& list : lists) found.push_back(checked(list));
  return found;
}

// ---- collectives -----------------------------------------------------------------------------------------------------
WorkPtr NCCL::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  count("nccl broadcast");
  auto all = checked(tensors);
  return keep(gloo_->broadcast(all, options), tensors);
}
WorkPtr NCCL::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  count("nccl allreduce");
  auto all = checked(tensors);
  return keep(gloo_->allreduce(all, options), tensors);
}
WorkPtr NCCL::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  count("nccl allreduce_coalesced");
  auto all = checked(tensors);
  return keep(gloo_->allreduce_coalesced(all, options), tensors);
}
WorkPtr NCCL::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  count("nccl reduce");
  auto all = checked(tensors);
  return keep(gloo_->reduce(all, options), tensors);
}
WorkPtr NCCL::allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  count("nccl allgather");
  auto to = checked(outputs);
  auto from = checked(inputs);
  return keep(gloo_->allgather(to, from, options));
}
WorkPtr NCCL::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  count("nccl allgather_base");
  auto to = checked(output), from = checked(input);
  return keep(gloo_->_allgather_base(to, from, options));
}
WorkPtr NCCL::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  count("nccl allgather_into_tensor_coalesced");
  auto to = checked(outputs), from = checked(inputs);
  return keep(gloo_->allgather_into_tensor_coalesced(to, from, options));
}
WorkPtr NCCL::gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  count("nccl gather");
  auto to = checked(outputs);
  auto from = checked(inputs);
  return keep(gloo_->gather(to, from, options));
}
WorkPtr NCCL::scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  count("nccl scatter");
  auto to = checked(outputs);
  auto from = checked(inputs);
  return keep(gloo_->scatter(to, from, options));
}
WorkPtr NCCL::reduce_scatter(Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  count("nccl reduce_scatter");
  auto to = checked(outputs);
  auto from = checked(inputs);
  return keep(gloo_->reduce_scatter(to, from, options));
}
WorkPtr NCCL::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  count("nccl reduce_scatter_base");
  auto to = checked(output), from = checked(input);
  return keep(gloo_->_reduce_scatter_base(to, from, options));
}
WorkPtr NCCL::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  count("nccl reduce_scatter_tensor_coalesced");
  auto to = checked(outputs), from = checked(inputs);
  return keep(gloo_->reduce_scatter_tensor_coalesced(to, from, options));
}
WorkPtr NCCL::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                         std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& options) {
  count("nccl alltoall_base");
  auto to = checked(output), from = checked(input);
  return keep(gloo_->alltoall_base(to, from, output_sizes, input_sizes, options));
}
WorkPtr NCCL::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  count("nccl alltoall");
  auto to = checked(outputs), from = checked(inputs);
  return keep(gloo_->alltoall(to, from, options));
}
WorkPtr NCCL::send(Tensors& tensors, int destination, int tag) {
  count("nccl send");
  auto all = checked(tensors, /*collective=*/false);
  return keep(gloo_->send(all, destination, tag));
}
WorkPtr NCCL::recv(Tensors& tensors, int source, int tag) {
  count("nccl recv");
  auto all = checked(tensors, /*collective=*/false);
  return keep(gloo_->recv(all, source, tag));
}
WorkPtr NCCL::barrier(const c10d::BarrierOptions& options) {
  count("nccl barrier");
  return keep(gloo_->barrier(options));
}

}  // namespace fake_gpu

// ---- what libtorch_python.so of a build for CUDA calls while it is loaded (cuda_part.py) -------------------------------
extern "C" {
void* _ZN4c10d15get_gil_checkerEv() {  // the place of a pointer, c10d::get_gil_checker()
  static void* checker;
  return &checker;
}
// The default of an argument, c10d::ProcessGroupNCCL::Options::Options(bool)
void _ZN4c10d16ProcessGroupNCCL7OptionsC1Eb(void* memory, bool) { new (memory) c10d::Backend::Options("nccl"); }
}
