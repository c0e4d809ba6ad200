// The round over a torch process group: the fallback for ranks that share no memory. One all-reduce
// per unit, in unit order.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "bucket/round.h"
#include "transport/store.h"

namespace pydist {

class ProcessGroupRound final : public Round {
 public:
  // `store` has a prefix of its own: ranks leave their failures there.
  ProcessGroupRound(c10::intrusive_ptr<c10d::ProcessGroup> group, std::unique_ptr<Store> store,
                    RoundOptions options);

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  std::string describe(int rank) const override;
  void* unit_memory(int unit) override;
  std::shared_ptr<void> hold_memory(int unit) override;
  bool reaches(const void*) const override { return false; }
  bool publishes_all() const override { return true; }
  void begin() override;
  void publish(int unit, void* data) override;
  void progress() override {}
  const std::vector<RoundRecord>& end(const RoundRecord& mine) override;
  void finish() override;
  void check() override;
  void check_now() override;
  void fail(const std::string& reason) noexcept override;
  bool drain() noexcept override;

 private:
  // A unit on its way; half types travel as float32, so that their sum is rounded once.
  struct Launched {
    int unit;
    at::Tensor wire;
    c10::intrusive_ptr<c10d::Work> work;
  };
  at::Tensor& memory(int unit);
  void launch(int unit);
  void launch_rest();
  void await(const c10::intrusive_ptr<c10d::Work>& work, const std::string& operation);
  [[noreturn]] void raise_failed(const std::string& operation);
  [[noreturn]] void raise_timeout(const std::string& operation);
  [[noreturn]] void raise_lost(const std::string& operation, const char* cause, double waited_s);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::unique_ptr<Store> store_;
  RoundOptions options_;
  std::vector<at::Tensor> memory_;
  std::vector<bool> published_;
  std::vector<Launched> launched_;
  std::vector<RoundRecord> records_;
  uint64_t round_ = 0;
  int next_ = 0;         // the lowest unit that has not been launched in this round
  std::string failure_;  // why no further round is possible
};

}  // namespace pydist
