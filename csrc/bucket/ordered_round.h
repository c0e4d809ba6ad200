// A round whose units are reduced in unit order, by calls that every rank makes in the same order;
// how a call is made and what carries it is a transport's. Pure.
#pragma once

#include <vector>

#include "bucket/round.h"

namespace pydist {

class OrderedRound : public Round {
 public:
  bool publishes_all() const override { return true; }
  void begin(int divisor) override;
  bool postpone(int unit) override {
    postponed_[unit] = true;
    return true;
  }
  void publish(int unit, void* data) override;
  void progress() override {}
  const std::vector<RoundRecord>& end(const RoundRecord& mine) override;

 protected:
  OrderedRound(RoundOptions options, int size);

  // Begins to reduce the unit at `data`.
  virtual void launch(int unit, void* data) = 0;
  // Fills `all`, a record's words by rank, after the calls launched so far. Waits.
  virtual void exchange(const std::vector<uint64_t>& mine, uint64_t* all) = 0;

  // The mean is the sum divided by this.
  int divisor() const { return divisor_; }
  uint64_t number() const { return number_; }  // of this round

  const RoundOptions options_;

 private:
  void begin_to_reduce(int unit);

  std::vector<void*> published_;  // by unit; null: not yet
  std::vector<bool> postponed_;
  std::vector<RoundRecord> records_;
  bool ended_ = false;
  uint64_t number_ = 0;
  int divisor_ = 0;
  int next_ = 0;          // the lowest unit that has not been launched in this round
  int64_t first_ns_ = 0;  // when the first unit of this round was; 0: none
};

}  // namespace pydist
