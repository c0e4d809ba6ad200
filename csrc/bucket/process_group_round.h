// The round over a torch process group: the fallback where there is no transport of our own. One
// all-reduce per unit; half types by slices (sliced_mean.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "bucket/ordered_round.h"
#include "bucket/sliced_mean.h"
#include "transport/store.h"

namespace pydist {

class ProcessGroupRound final : public OrderedRound {
 public:
  // `store` has a prefix of its own: ranks leave their failures there.
  ProcessGroupRound(c10::intrusive_ptr<c10d::ProcessGroup> group, std::unique_ptr<Store> store,
                    RoundOptions options);

  ~ProcessGroupRound() override;

  int rank() const override { return group_->getRank(); }
  int size() const override { return group_->getSize(); }
  std::string describe(int rank) const override;
  void* unit_memory(int unit) override;
  std::shared_ptr<void> hold_memory(int unit) override;
  bool reaches(const void*) const override { return false; }
  void begin(int divisor) override;
  void finish() override;
  void check() override;
  void check_now() override;
  void fail(const std::string& reason) noexcept override;
  bool drain() noexcept override;

 private:
  // Made at first use: one of both.
  struct Memory {
    at::Tensor whole;
    std::shared_ptr<SlicedMean> slices;
  };
  struct Launched {
    int unit;
    c10::intrusive_ptr<c10d::Work> work;
  };
  using Start = std::function<c10::intrusive_ptr<c10d::Work>()>;
  Memory& memory(int unit);
  void launch(int unit, void* data) override;
  void exchange(const std::vector<uint64_t>& mine, uint64_t* all) override;
  c10::intrusive_ptr<c10d::Work> start(const std::string& operation, const Start& collective);
  std::string reducing(int unit) const { return "all-reducing " + options_.unit_names[unit]; }
  void await(const c10::intrusive_ptr<c10d::Work>& work, const std::string& operation);
  [[noreturn]] void raise_failed(const std::string& operation);
  [[noreturn]] void raise_timeout(const std::string& operation);
  void leave_sign();
  std::string absent_ranks() noexcept;
  [[noreturn]] void raise_lost(const std::string& operation, const char* cause, double waited_s);

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::unique_ptr<Store> store_;
  std::vector<Memory> memory_;
  std::vector<Launched> launched_;
  std::string failure_;  // why no further round is possible
};

}  // namespace pydist
