// The backend "pydist" of torch.distributed: torch's operations on the CPU, over a communicator.
//
// A call makes a Plan of the engine's steps, which runs here and now where the caller waits for it,
// and on the communicator's worker where it does not. What a rank's own arguments have wrong its
// peers learn too, as they are about to wait for the call.
//
//   backend.cpp           how plans run; the group itself
//   backend_gather.cpp    collectives that move tensors
//   backend_reduce.cpp    those that reduce them
//   backend_sparse.cpp    sums of sparse tensors
//   backend_messages.cpp  send and recv, and barriers
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "backend/plan.h"
#include "backend/torch_versions.h"
#include "backend/work.h"
#include "collective/communicator.h"

namespace pydist {

class Backend final : public c10d::Backend {
 public:
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;
  using TensorLists = std::vector<std::vector<at::Tensor>>;
  // Makes the backend of a part of this group's ranks, which this rank is one of. Collective over
  // the part.
  using Split = std::function<c10::intrusive_ptr<c10d::Backend>(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<Options>& options)>;

  Backend(std::shared_ptr<Communicator> communicator, c10::intrusive_ptr<Options> options,
          Split split);

  const std::shared_ptr<Communicator>& communicator() const { return communicator_; }

  // -- the group (backend.cpp) --------------------------------------------------------------------

  const std::string getBackendName() const override { return "pydist"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void setSequenceNumberForGroup() override {}  // all ranks begin with 0
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void enableCollectivesTiming() override {}  // as with Gloo
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPointer endCoalescing() override;
  void abort() override;

  // -- moving (backend_gather.cpp) ----------------------------------------------------------------

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override;
  WorkPointer allgather(TensorLists& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override;
  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input,
                              const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                  const c10d::AllgatherOptions& options) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override;
  WorkPointer gather(TensorLists& outputs, Tensors& inputs,
                     const c10d::GatherOptions& options) override;
  WorkPointer scatter(Tensors& outputs, TensorLists& inputs,
                      const c10d::ScatterOptions& options) override;
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs,
                       const c10d::AllToAllOptions& options) override;
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input,
                            std::vector<int64_t>& output_splits, std::vector<int64_t>& input_splits,
                            const c10d::AllToAllOptions& options) override;

  // -- reducing (backend_reduce.cpp) --------------------------------------------------------------

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& options) override;
  // For tensors of layout sparse; allreduce() sends them here.
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) override;
  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override;
  WorkPointer reduce_scatter(Tensors& outputs, TensorLists& inputs,
                             const c10d::ReduceScatterOptions& options) override;
  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& options) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override;

  // -- messages and barriers (backend_messages.cpp) -----------------------------------------------

  WorkPointer send(Tensors& tensors, int destination, int tag) override;
  WorkPointer recv(Tensors& tensors, int source, int tag) override;
  WorkPointer recvAnysource(Tensors& tensors, int tag) override;
  WorkPointer barrier(const c10d::BarrierOptions& options) override;
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override;

 private:
  // How a call of torch wants to be run.
  struct How {
    std::chrono::milliseconds timeout;
    bool async_op;
  };

  // Runs the steps that `fill(plan)` adds to the plan, or starts them.
  WorkPointer launch(Plan plan, const How& how, const std::function<void(Plan&)>& fill);
  void start(const c10::intrusive_ptr<Work>& work, double timeout_s);
  void follow(const c10::intrusive_ptr<Work>& work, std::vector<std::shared_ptr<Request>> requests,
              double timeout_s);
  WorkPointer start_message(Plan plan, bool sends, const at::Tensor& tensor, int peer, int tag);
  // outputs[r] becomes rank r's input; their sizes may differ.
  static void add_all_gather(Plan& plan, const Tensors& outputs, const at::Tensor& input);
  std::vector<int64_t> exchange_counts(const at::Tensor& tensor);
  // Raises UsageError unless there is one tensor.
  static const at::Tensor& only(const Tensors& tensors);
  void check_root(int64_t root) const;
  void check_length(size_t found, const char* what) const;

  const std::shared_ptr<Communicator> communicator_;
  const c10::intrusive_ptr<Options> options_;
  const Split split_;
  std::atomic<uint64_t> sequence_{0};
  // Between startCoalescing() and endCoalescing(): what was started.
  std::mutex coalescing_mutex_;
  std::optional<std::vector<std::shared_ptr<Request>>> coalesced_;
};

}  // namespace pydist
