// The round over several hosts: one all_reduce per unit, in place, on a communicator of the round's
// own, whose worker reduces while backward goes on. Units lie in the arena, where the ranks of a
// host reach them; between hosts they may travel in a narrower type. No torch.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket/arena_units.h"
#include "bucket/ordered_round.h"
#include "collective/hosts_communicator.h"

namespace pydist {

class HostRound final : public OrderedRound {
 public:
  // `wire`: what float32 travels as between hosts.
  HostRound(std::shared_ptr<HostsCommunicator> communicator, std::optional<DType> wire,
            RoundOptions options);
  ~HostRound() override;

  int rank() const override { return communicator_->rank(); }
  int size() const override { return communicator_->size(); }
  std::string describe(int rank) const override { return communicator_->describe(rank); }
  void* unit_memory(int unit) override { return memory_.memory(unit); }
  std::shared_ptr<void> hold_memory(int unit) override { return memory_.hold(unit); }
  bool reaches(const void* data) const override { return Arena::instance().is_block(data); }
  void pin(void* data) override { Arena::instance().pin(data); }
  void unpin(void* data) noexcept override { Arena::instance().unpin(data); }
  void begin(int divisor) override;
  void finish() override;
  void check() override;
  void fail(const std::string& reason) noexcept override { communicator_->fail(reason); }
  bool drain() noexcept override;

 private:
  struct Launched {
    int unit;
    std::shared_ptr<Request> request;
  };
  void launch(int unit, void* data) override;
  void exchange(const std::vector<uint64_t>& mine, uint64_t* all) override;
  void await(Request& request);
  void await_units();

  const std::shared_ptr<HostsCommunicator> communicator_;
  const std::optional<DType> wire_;
  ArenaUnits memory_;
  std::vector<Launched> launched_;
};

}  // namespace pydist
