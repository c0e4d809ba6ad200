#include "planted.h"

#include <array>

namespace pydist::emulation {

namespace {

constexpr int kNumBugs = static_cast<int>(Bug::kCount);
constexpr const char* kNames[kNumBugs] = {
    "no_wait",     "no_record",      "no_group_end", "wrong_count",  "wrong_dtype",
    "wrong_order", "wrong_stream",   "freed_early",  "reused_early", "used_after_abort",
    "not_polled",  "copied_too_far", "wrong_launch"};

// How many occasions are still to be let go by; negative: none is planted, or it has struck.
std::array<std::atomic<int64_t>, kNumBugs>& remaining() {
  static auto* counts = [] {
    auto* made = new std::array<std::atomic<int64_t>, kNumBugs>();
    for (auto& count : *made) count = -1;
    return made;
  }();
  return *counts;
}

}  // namespace

bool plant(const std::string& name, int64_t nth) {
  for (int bug = 0; bug < kNumBugs; ++bug) {
    if (name != kNames[bug]) continue;
    remaining()[bug] = nth;
    return true;
  }
  return false;
}

bool strikes(Bug bug) {
  std::atomic<int64_t>& count = remaining()[static_cast<int>(bug)];
  return count >= 0 && count.fetch_sub(1) == 0;
}

void remove_planted() {
  for (auto& count : remaining()) count = -1;
}

}  // namespace pydist::emulation
