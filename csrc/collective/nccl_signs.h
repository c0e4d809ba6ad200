// Signs of life: how far ranks have come when one of them has waited too long, and what that says.
// Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace pydist {

// What a rank writes into the Store.
struct Sign {
  uint64_t num_enqueued = 0;  // calls
  uint64_t num_complete = 0;
  // The oldest call under way, else the last one, and for how long.
  bool is_under_way = false;
  bool has_left = false;  // its communicator is no more
  uint64_t at = 0;
  double for_s = 0;
  std::string text = {};  // "all-reducing bucket 3 of DataParallel(GPT)"

  std::string encode() const;
  static Sign decode(const std::string& encoded);
};

struct RankState {
  std::string name;               // "rank 1 (pid 1234)"
  std::optional<Sign> sign = {};  // nothing: it did not answer
  bool has_ended = false;         // its process is known to be gone
};

// A message: rank `me` waited for the call of its sign, and which ranks are why.
std::string explain_timeout(const std::vector<RankState>& ranks, int me, double timeout_s);

}  // namespace pydist
