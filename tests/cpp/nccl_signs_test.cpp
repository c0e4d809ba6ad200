// What a timeout's message says of the ranks, from what they have written into the Store.
#include "collective/nccl_signs.h"

#include <cstdio>
#include <string>
#include <vector>

#include "check.h"

using pydist::RankState;
using pydist::Sign;

namespace {

Sign under_way(uint64_t at, uint64_t num_enqueued, const char* text) {
  Sign sign;
  sign.num_enqueued = num_enqueued;
  sign.num_complete = at - 1;
  sign.is_under_way = true;
  sign.at = at;
  sign.for_s = 31.4;
  sign.text = text;
  return sign;
}

Sign idle_after(uint64_t at, const char* text) {
  Sign sign;
  sign.num_enqueued = sign.num_complete = sign.at = at;
  sign.for_s = 2.26;
  sign.text = text;
  return sign;
}

const Sign kMine = under_way(118, 120, "all-reducing bucket 3");

std::string message(const RankState& other) {
  return pydist::explain_timeout({{"rank 0 (pid 1)", kMine}, other}, 0, 30);
}

void expect(const RankState& other, const std::string& end) {
  const std::string text = message(other);
  const std::string expected = "rank 0 (pid 1) waited 30 s for all-reducing bucket 3 (call 118)";
  if (text != expected + end) std::fprintf(stderr, "found: %s\n", text.c_str());
  CHECK(text == expected + end);
}

void test_each_reason() {
  expect({"rank 1", idle_after(117, "all-reducing bucket 2")},
         ", which rank 1 has not made: its last was call 117, all-reducing bucket 2, 2.3 s ago");
  Sign left = idle_after(117, "all-reducing bucket 2");
  left.has_left = true;
  expect({"rank 1", left},
         ", which rank 1 has not made: it has ended its communicator; its last was call 117, "
         "all-reducing bucket 2, 2.3 s ago");
  expect({"rank 1", under_way(116, 117, "all-reducing bucket 1")},
         ", which rank 1 has not made: it is at call 116, all-reducing bucket 1, for 31 s");
  expect({"rank 1", Sign{}}, ", which rank 1 has not made: it has made no call yet");
  expect({"rank 1", under_way(117, 118, "all-reducing bucket 2")},
         ", rank 1 has made it, but its device is at call 117, all-reducing bucket 2");
  expect({"rank 1", under_way(118, 118, "broadcasting buffers")},
         ", rank 1 made another call in its place: broadcasting buffers");
  expect({"rank 1"}, ", rank 1 gives no sign of life");
  expect({"rank 1", idle_after(9, "x"), true}, ", rank 1 has ended");
  expect(
      {"rank 1", kMine},
      ", which all ranks have made: the network or a device hangs, or ranks called with different "
      "sizes (NCCL_DEBUG=INFO says more)");
}

void test_several_ranks() {
  const std::string text = pydist::explain_timeout(
      {{"rank 0", kMine}, {"rank 1", kMine}, {"rank 2", Sign{}}, {"rank 3", Sign{}}, {"rank 4"}}, 1,
      1800);
  CHECK(text ==
        "rank 1 waited 1800 s for all-reducing bucket 3 (call 118), which rank 2 has not made: it "
        "has made no call yet; rank 3 has not made it: it has made no call yet; rank 4 gives no "
        "sign of life");
}

void test_a_sign_survives_the_store() {
  Sign sign = under_way(118, 120, "sending two\nlines");
  const Sign read = Sign::decode(sign.encode());
  CHECK(read.num_enqueued == 120 && read.num_complete == 117 && read.is_under_way);
  CHECK(read.at == 118 && read.text == "sending two\nlines" && read.for_s == sign.for_s);
  sign.has_left = true;
  CHECK(!read.has_left && Sign::decode(sign.encode()).has_left);
  CHECK(!Sign::decode(idle_after(3, "").encode()).is_under_way);
  CHECK(Sign::decode("").num_enqueued == 0);
}

}  // namespace

int main() {
  test_each_reason();
  test_several_ranks();
  test_a_sign_survives_the_store();
  return 0;
}
