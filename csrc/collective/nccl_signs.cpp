#include "collective/nccl_signs.h"

#include <cmath>
#include <sstream>

#include "base/error.h"

namespace pydist {

namespace {

// "35 s", "0.4 s"
std::string seconds(double s) {
  return s < 10 ? concat(std::round(s * 10) / 10, " s") : concat(std::llround(s), " s");
}

std::string whereabouts(const Sign& sign) {
  if (sign.num_enqueued == 0) {
    return sign.has_left ? "it has ended its communicator" : "it has made no call yet";
  }
  if (sign.is_under_way) {
    return concat("it is at call ", sign.at, ", ", sign.text, ", for ", seconds(sign.for_s));
  }
  return concat(
      sign.has_left ? "it has ended its communicator; its last was call " : "its last was call ",
      sign.at, ", ", sign.text, ", ", seconds(sign.for_s), " ago");
}

// What is to say of one rank, as a clause; empty where it is no worse off than the one that waits.
// `is_first`: the clause follows the call's name.
std::string blame(const RankState& rank, const Sign& mine, bool is_first) {
  if (rank.has_ended) return rank.name + " has ended";
  if (!rank.sign) return rank.name + " gives no sign of life";
  const Sign& sign = *rank.sign;
  if (sign.num_enqueued < mine.at) {
    return is_first ? concat("which ", rank.name, " has not made: ", whereabouts(sign))
                    : concat(rank.name, " has not made it: ", whereabouts(sign));
  }
  if (sign.is_under_way && sign.at < mine.at) {
    return concat(rank.name, " has made it, but its device is at call ", sign.at, ", ", sign.text);
  }
  if (sign.is_under_way && sign.at == mine.at && sign.text != mine.text) {
    return concat(rank.name, " made another call in its place: ", sign.text);
  }
  return "";
}

}  // namespace

std::string Sign::encode() const {
  return concat(num_enqueued, " ", num_complete, " ", is_under_way ? 1 : 0, " ", has_left ? 1 : 0,
                " ", at, " ", for_s, "\n", text);
}

Sign Sign::decode(const std::string& encoded) {
  Sign sign;
  const size_t line = encoded.find('\n');
  std::istringstream numbers(encoded.substr(0, line));
  int is_under_way = 0;
  int has_left = 0;
  numbers >> sign.num_enqueued >> sign.num_complete >> is_under_way >> has_left >> sign.at >>
      sign.for_s;
  sign.has_left = has_left != 0;
  sign.is_under_way = is_under_way != 0;
  if (line != std::string::npos) sign.text = encoded.substr(line + 1);
  return sign;
}

std::string explain_timeout(const std::vector<RankState>& ranks, int me, double timeout_s) {
  const Sign& mine = *ranks[me].sign;
  std::string text = concat(ranks[me].name, " waited ", seconds(timeout_s), " for ", mine.text,
                            " (call ", mine.at, ")");
  std::string blames;
  for (size_t r = 0; r < ranks.size(); ++r) {
    if (static_cast<int>(r) == me) continue;
    const std::string clause = blame(ranks[r], mine, blames.empty());
    if (!clause.empty()) blames += concat(blames.empty() ? ", " : "; ", clause);
  }
  if (!blames.empty()) return text + blames;
  return text +
         ", which all ranks have made: the network or a device hangs, or ranks called "
         "with different sizes (NCCL_DEBUG=INFO says more)";
}

}  // namespace pydist
