#include "backend/process_group_network.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "base/fork.h"

namespace pydist {

namespace {

using Tensors = std::vector<at::Tensor>;

// The same memory, which the tensor holds.
at::Tensor tensor_of(const SharedBytes& bytes, int64_t nbytes) {
  return at::from_blob(bytes.get(), {nbytes}, [bytes](void*) {}, at::TensorOptions(at::kByte));
}

int64_t sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

class WorkExchange final : public Exchange {
 public:
  explicit WorkExchange(c10::intrusive_ptr<c10d::Work> work) : work_(std::move(work)) {}

  bool test() override { return work_->isCompleted(); }

  void finish() override {
    const std::exception_ptr error = work_->exception();
    if (!error) return;
    try {
      std::rethrow_exception(error);
    } catch (const std::exception& text) {
      throw NetworkError(text.what());
    }
  }

 private:
  const c10::intrusive_ptr<c10d::Work> work_;
};

}  // namespace

ProcessGroupNetwork::ProcessGroupNetwork(c10::intrusive_ptr<c10d::Backend> backend)
    : backend_(std::move(backend)) {}

ProcessGroupNetwork::~ProcessGroupNetwork() {
  const bool has_ended = std::all_of(under_way_.begin(), under_way_.end(),
                                     [](const Work& work) { return work->isCompleted(); });
  if (has_ended && !in_forked_child()) return;  // in a child its threads are not there
  (void)backend_.release();
}

template <class Start>
Network::Started ProcessGroupNetwork::start(Start&& start_work) {
  const std::lock_guard<std::mutex> lock(mutex_);
  under_way_.erase(std::remove_if(under_way_.begin(), under_way_.end(),
                                  [](const Work& work) { return work->isCompleted(); }),
                   under_way_.end());
  try {
    Work work = start_work();
    under_way_.push_back(work);
    return std::make_unique<WorkExchange>(std::move(work));
  } catch (const std::exception& error) {
    throw NetworkError(error.what());
  }
}

Network::Started ProcessGroupNetwork::all_to_all(const SharedBytes& from, const SharedBytes& to,
                                                 size_t part_nbytes) {
  const auto nbytes = static_cast<int64_t>(part_nbytes) * size();
  return start([&] {
    at::Tensor input = tensor_of(from, nbytes), output = tensor_of(to, nbytes);
    std::vector<int64_t> sent, received;  // none: equal parts
    return backend_->alltoall_base(output, input, received, sent, {});
  });
}

Network::Started ProcessGroupNetwork::all_to_all(const SharedBytes& from, std::vector<int64_t> sent,
                                                 const SharedBytes& to,
                                                 std::vector<int64_t> received) {
  return start([&] {
    at::Tensor input = tensor_of(from, sum(sent)), output = tensor_of(to, sum(received));
    return backend_->alltoall_base(output, input, received, sent, {});
  });
}

Network::Started ProcessGroupNetwork::all_gather(const SharedBytes& from, const SharedBytes& to,
                                                 size_t nbytes) {
  return start([&] {
    at::Tensor input = tensor_of(from, static_cast<int64_t>(nbytes));
    at::Tensor output = tensor_of(to, static_cast<int64_t>(nbytes) * size());
    return backend_->_allgather_base(output, input, {});
  });
}

Network::Started ProcessGroupNetwork::broadcast(const SharedBytes& data, size_t nbytes, int root) {
  return start([&] {
    Tensors tensors{tensor_of(data, static_cast<int64_t>(nbytes))};
    c10d::BroadcastOptions options;
    options.rootRank = root;
    options.rootTensor = 0;
    return backend_->broadcast(tensors, options);
  });
}

}  // namespace pydist
