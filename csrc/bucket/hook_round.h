// The round that hands its units, as buckets, to a communication hook; another round carries what
// ranks must agree on.
//
// Buckets go to the hook in unit order, each as soon as it is published and the future of the one
// before is complete: a hook whose callbacks communicate (quantization, PowerSGD) then makes its
// calls in the same order on all ranks, which process groups rely on.
//
// A hook that raises is called no more in that round. The rank goes on to the end of its backward,
// where ranks tell each other: if the hook raised on all of them, nothing is on its way anywhere,
// everybody raises its own error, and the next round is as good as new. Else peers may be waiting
// inside the hook for what never comes, so the group has failed for good. Who waits for a future
// learns of a peer's error through the store.
#pragma once

#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "bucket/round.h"
#include "transport/store.h"

namespace pydist {

class HookRound final : public Round {
 public:
  // Of the inner round: no units, and a bit more in every record, which says that the hook raised.
  static RoundOptions inner_options(const RoundOptions& options);

  // `parameters` are the model's, which the options' units refer to; `store` has a prefix of its
  // own.
  HookRound(std::unique_ptr<Round> inner, std::unique_ptr<c10d::CommHookInterface> hook,
            std::unique_ptr<Store> store, std::vector<at::Tensor> parameters, RoundOptions options);

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string describe(int rank) const override { return inner_->describe(rank); }
  void* unit_memory(int unit) override { return memory(unit).data_ptr(); }
  std::shared_ptr<void> hold_memory(int unit) override;
  bool reaches(const void*) const override { return false; }
  bool publishes_all() const override { return true; }
  void begin(int divisor) override;
  void begin_second(int divisor) override;
  void accumulated(int unit) override { inner_->accumulated(unit); }
  void open(int unit) override { inner_->open(unit); }
  void copy(int unit, CopyDirection direction, const std::vector<PackItem>& items) override {
    inner_->copy(unit, direction, items);
  }
  void publish(int unit, void* data) override;
  void progress() override { advance(false); }
  const std::vector<RoundRecord>& end(const RoundRecord& mine) override;
  bool end_unanswered(const RoundRecord& mine) override;
  bool answers_late() const override { return inner_->answers_late(); }
  const std::vector<RoundRecord>* late_records() override;
  bool may_wait() const override { return inner_->may_wait(); }
  void finish() override {}  // results are in place since end()
  void delivered() override { inner_->delivered(); }
  void check() override { inner_->check(); }
  void fail(const std::string& reason) noexcept override;
  bool drain() noexcept override;

 private:
  at::Tensor& memory(int unit);
  void advance(bool skip_unpublished);
  void hand_over(int unit);
  c10d::GradBucket bucket(int unit);
  void take_result();
  void copy_result(int unit, at::Tensor result);
  void wait_for_hook(bool skip_unpublished);
  void look_for_raised_peers();
  void announce_error();
  void settle_error(const std::vector<RoundRecord>& records);
  [[noreturn]] void give_up(int peer);
  std::string bucket_name(int unit) const;
  std::string raised_key(int peer) const;

  std::unique_ptr<Round> inner_;
  std::unique_ptr<c10d::CommHookInterface> hook_;
  std::unique_ptr<Store> store_;
  std::vector<at::Tensor> parameters_;
  RoundOptions options_;
  std::vector<at::Tensor> memory_;
  std::vector<bool> published_;
  std::vector<RoundRecord> records_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;  // of the bucket that the hook has
  int current_ = -1;                                // that bucket
  int next_ = 0;                                    // the lowest unit that the hook has not seen
  std::exception_ptr error_;                        // what the hook raised in this round
  uint64_t round_ = 0;
  int64_t handed_ns_ = 0;  // when the hook got the first bucket
  bool second_ = false;    // of the same backward
  bool settled_ = false;   // all ranks raised: nobody needs to be told
};

}  // namespace pydist
