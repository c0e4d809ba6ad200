// The network between hosts over a torch backend of its own, which is Gloo.
//
// Gloo runs what was started on threads of its own, a few operations at a time, and pairs them with
// those of the other ranks by their order.
#pragma once

#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "collective/network.h"

namespace pydist {

class ProcessGroupNetwork final : public Network {
 public:
  explicit ProcessGroupNetwork(c10::intrusive_ptr<c10d::Backend> backend);
  // Leaves the backend behind where something is still under way, whose end it would wait for.
  ~ProcessGroupNetwork() override;

  int rank() const override { return backend_->getRank(); }
  int size() const override { return backend_->getSize(); }
  Started all_to_all(const SharedBytes& from, const SharedBytes& to, size_t part_nbytes) override;
  Started all_to_all(const SharedBytes& from, std::vector<int64_t> sent, const SharedBytes& to,
                     std::vector<int64_t> received) override;
  Started all_gather(const SharedBytes& from, const SharedBytes& to, size_t nbytes) override;
  Started broadcast(const SharedBytes& data, size_t nbytes, int root) override;

 private:
  using Work = c10::intrusive_ptr<c10d::Work>;
  template <class Start>
  Started start(Start&& start_work);

  c10::intrusive_ptr<c10d::Backend> backend_;
  std::mutex mutex_;             // starts come one at a time, from any thread
  std::vector<Work> under_way_;  // what had not ended when the last one was started, and that one
};

}  // namespace pydist
