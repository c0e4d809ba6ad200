// What has been enqueued on a communicator's stream and may not be complete: an event for each call
// and each mark, used again once the device has passed it.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/device_handles.h"

namespace pydist {

class NcclCalls {
 public:
  explicit NcclCalls(Stream stream) : stream_(stream), entries_(kStartSize) {}

  // Around a call: begin() before it is made, end() once it is enqueued, cancel() if it never was;
  // one call at a time. The parts make a message: "all-reducing" "bucket 3 of ...".
  void begin(const char* verb, const std::string& what);
  void end();
  void cancel();
  // Marks what is enqueued so far, calls or not. Marks grow.
  uint64_t mark();
  bool is_done(uint64_t mark);
  bool is_known_done(uint64_t mark) const;  // without asking the device

  struct Call {
    uint64_t number = 0;  // 1 for the first
    std::string text = {};
    double waited_s = 0;  // since it was made and the one before it complete
  };
  struct Progress {
    uint64_t num_enqueued = 0;  // or about to be
    uint64_t num_complete = 0;
    std::optional<Call> oldest = {};  // of those under way
    Call last = {};                   // of all
  };
  // Raises where the device has failed.
  Progress progress();
  // The age of the oldest call under way; 0 where there is none. Raises likewise.
  double waited_s();
  // The last one given out: what a mark is while a graph is captured, when none can be made.
  uint64_t last_mark() const;

 private:
  static constexpr size_t kStartSize = 64;  // grows when so many are under way

  struct Entry {
    uint64_t call = 0;  // 0: a mark
    bool is_enqueued = false;
    const char* verb = "";
    std::string what = {};
    double since_s = 0;
    OwnedEvent event = {};
  };
  size_t append();  // the place of a new entry
  void advance();
  void grow();
  const Entry* oldest_call() const;

  const Stream stream_;
  mutable std::mutex mutex_;
  std::vector<Entry> entries_;  // a ring: the `count_` entries from `first_` on are under way
  size_t first_ = 0;
  size_t count_ = 0;
  size_t begun_ = 0;  // the place of the entry between begin() and end()
  uint64_t last_mark_ = 0;
  uint64_t num_enqueued_ = 0;
  uint64_t num_complete_ = 0;
  const char* last_verb_ = "";
  std::string last_what_;
  double last_since_s_ = 0;
  double advanced_s_ = 0;  // when an entry was last found complete
};

}  // namespace pydist
