#include "bucket/ordered_round.h"

#include <algorithm>
#include <utility>

#include "base/clock.h"

namespace pydist {

OrderedRound::OrderedRound(RoundOptions options, int size)
    : options_(std::move(options)),
      published_(options_.units.size(), nullptr),
      postponed_(options_.units.size(), false),
      records_(size, RoundRecord(options_.num_parameters)) {}

void OrderedRound::begin(int divisor) {
  ++number_;
  divisor_ = divisor > 0 ? divisor : size();
  next_ = 0;
  first_ns_ = 0;
  ended_ = false;
  std::fill(published_.begin(), published_.end(), nullptr);
  std::fill(postponed_.begin(), postponed_.end(), false);
}

// A unit waits for those before it.
void OrderedRound::publish(int unit, void* data) {
  published_[unit] = data;
  if (ended_) return begin_to_reduce(unit);
  for (; next_ < static_cast<int>(published_.size()); ++next_) {
    if (postponed_[next_]) continue;
    if (published_[next_] == nullptr) return;
    begin_to_reduce(next_);
  }
}

void OrderedRound::begin_to_reduce(int unit) {
  if (first_ns_ == 0) first_ns_ = monotonic_ns();
  launch(unit, published_[unit]);
}

const std::vector<RoundRecord>& OrderedRound::end(const RoundRecord& mine) {
  if (first_ns_ != 0) hidden_ns_ += monotonic_ns() - first_ns_;
  for (; next_ < static_cast<int>(published_.size()); ++next_) {
    if (published_[next_] != nullptr) begin_to_reduce(next_);
  }
  ended_ = true;
  std::vector<uint64_t> sent(mine.num_words());
  std::vector<uint64_t> all(sent.size() * records_.size());
  mine.write(sent.data());
  exchange(sent, all.data());
  for (size_t r = 0; r < records_.size(); ++r) records_[r].read(all.data() + r * sent.size());
  return records_;
}

}  // namespace pydist
