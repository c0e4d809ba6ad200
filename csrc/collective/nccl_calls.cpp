#include "collective/nccl_calls.h"

#include <algorithm>

#include "base/clock.h"
#include "base/error.h"

namespace pydist {

void NcclCalls::begin(const char* verb, const std::string& what) {
  const std::lock_guard<std::mutex> lock(mutex_);
  begun_ = append();
  Entry& entry = entries_[begun_];
  entry.call = ++num_enqueued_;
  entry.is_enqueued = false;
  entry.verb = verb;
  entry.what = what;  // into memory that the entry has already, after the first time around
  last_verb_ = verb;
  last_what_ = what;
  last_since_s_ = entry.since_s;
}

void NcclCalls::end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[begun_];
  entry.event.record(stream_);
  entry.is_enqueued = true;
}

// A mark may have come after it: the entry becomes one too.
void NcclCalls::cancel() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[begun_];
  entry.call = 0;
  entry.is_enqueued = true;  // an event that completes: what it recorded last
  --num_enqueued_;
}

uint64_t NcclCalls::mark() {
  const std::lock_guard<std::mutex> lock(mutex_);
  Entry& entry = entries_[append()];
  entry.call = 0;
  entry.is_enqueued = true;
  entry.event.record(stream_);
  return last_mark_;
}

uint64_t NcclCalls::last_mark() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return last_mark_;
}

size_t NcclCalls::append() {
  if (count_ == entries_.size()) advance();
  if (count_ == entries_.size()) grow();
  const size_t place = (first_ + count_) % entries_.size();
  entries_[place].since_s = monotonic_s();
  ++count_;
  ++last_mark_;
  return place;
}

void NcclCalls::grow() {
  std::vector<Entry> larger(2 * entries_.size());
  for (size_t i = 0; i < count_; ++i) {
    std::swap(larger[i], entries_[(first_ + i) % entries_.size()]);
  }
  entries_.swap(larger);
  begun_ = (begun_ + larger.size() - first_) % larger.size();
  first_ = 0;
}

void NcclCalls::advance() {
  while (count_ > 0 && entries_[first_].is_enqueued && entries_[first_].event.is_complete()) {
    num_complete_ = std::max(num_complete_, entries_[first_].call);
    first_ = (first_ + 1) % entries_.size();
    --count_;
    advanced_s_ = monotonic_s();
  }
}

bool NcclCalls::is_done(uint64_t mark) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (mark > last_mark_ - count_) advance();
  return mark <= last_mark_ - count_;
}

bool NcclCalls::is_known_done(uint64_t mark) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return mark <= last_mark_ - count_;
}

const NcclCalls::Entry* NcclCalls::oldest_call() const {
  for (size_t i = 0; i < count_; ++i) {
    const Entry& entry = entries_[(first_ + i) % entries_.size()];
    if (entry.call != 0) return &entry;
  }
  return nullptr;
}

NcclCalls::Progress NcclCalls::progress() {
  const std::lock_guard<std::mutex> lock(mutex_);
  advance();
  const double now_s = monotonic_s();
  Progress progress;
  progress.num_enqueued = num_enqueued_;
  progress.num_complete = num_complete_;
  if (const Entry* oldest = oldest_call()) {
    progress.oldest = Call{oldest->call, concat(oldest->verb, " ", oldest->what),
                           now_s - std::max(oldest->since_s, advanced_s_)};
  }
  progress.last = Call{num_enqueued_, concat(last_verb_, " ", last_what_), now_s - last_since_s_};
  return progress;
}

double NcclCalls::waited_s() {
  const std::lock_guard<std::mutex> lock(mutex_);
  advance();
  const Entry* oldest = oldest_call();
  return oldest == nullptr ? 0 : monotonic_s() - std::max(oldest->since_s, advanced_s_);
}

}  // namespace pydist
