// The ring's plan: for any number of elements, ranks and segments in flight, followed step by step
// with sets of ranks instead of sums.
#include "collective/ring_plan.h"

#include <vector>

#include "check.h"

using namespace pydist;

namespace {

using Ranks = std::vector<int>;  // whose elements a sum has, in the order of adding

std::vector<RingPlan> plans_of(int64_t count, int size, int in_flight, int64_t alignment) {
  std::vector<RingPlan> plans;
  for (int rank = 0; rank < size; ++rank) {
    plans.emplace_back(count, size, rank, in_flight, alignment);
  }
  return plans;
}

// The segments that a rank sends first, of all ranks, are the whole buffer, each element once.
void check_partition(const std::vector<RingPlan>& plans, int64_t count, int64_t alignment) {
  int64_t end = 0;
  int index = 0;
  for (const RingPlan& plan : plans) {
    for (int k = 0; k < plan.segments_in_flight(); ++k) {
      const RingSegment segment = plan.sent(0, k);
      CHECK(segment.index == index++);
      CHECK(segment.begin == end && segment.count >= 0);
      CHECK(segment.count <= plan.segment_elements());
      CHECK(segment.begin % alignment == 0 || segment.count == 0);
      end += segment.count;
    }
  }
  CHECK(end == count && index == plans[0].num_segments());
}

void check_step(const std::vector<RingPlan>& plans, int step, int k,
                std::vector<std::vector<Ranks>>& sums) {
  const int size = static_cast<int>(plans.size());
  std::vector<std::vector<Ranks>> after = sums;
  for (int rank = 0; rank < size; ++rank) {
    const int next = (rank + 1) % size;
    const RingSegment sent = plans[rank].sent(step, k);
    const RingSegment met = plans[next].received(step, k);
    CHECK(sent.index == met.index && sent.begin == met.begin && sent.count == met.count);
    Ranks& sum = after[next][sent.index];
    const Ranks& received = sums[rank][sent.index];
    if (plans[next].adds(step)) {
      CHECK(sum == Ranks{next});  // not added before
      sum = received;
      sum.push_back(next);
      CHECK(plans[next].completes(step) == (static_cast<int>(sum.size()) == size));
    } else {
      CHECK(static_cast<int>(received.size()) == size);
      sum = received;
    }
  }
  sums = after;
}

void check_ring(int64_t count, int size, int in_flight, int64_t alignment) {
  const std::vector<RingPlan> plans = plans_of(count, size, in_flight, alignment);
  check_partition(plans, count, alignment);
  const int num_segments = plans[0].num_segments();
  std::vector<std::vector<Ranks>> sums;  // by rank, by segment
  for (int rank = 0; rank < size; ++rank) sums.emplace_back(num_segments, Ranks{rank});
  for (int step = 0; step < plans[0].num_steps(); ++step) {
    for (int k = 0; k < in_flight; ++k) check_step(plans, step, k, sums);
  }
  for (int rank = 0; rank < size; ++rank) {
    for (int index = 0; index < num_segments; ++index) {
      Ranks in_order;
      for (int i = 0; i < size; ++i) in_order.push_back((index / in_flight + i) % size);
      CHECK(sums[rank][index] == in_order);
    }
  }
}

void test_every_element_is_added_once_in_the_stated_order() {
  for (const int size : {1, 2, 3, 4, 7}) {
    for (const int in_flight : {1, 2, 3}) {
      for (const int64_t alignment : {1, 4, 128}) {
        for (int64_t count = 0; count < 30; ++count) check_ring(count, size, in_flight, alignment);
        for (const int64_t count : {127, 128, 4097, 100003}) {
          check_ring(count, size, in_flight, alignment);
        }
      }
    }
  }
}

void test_no_count_is_too_large() { check_ring((int64_t{1} << 40) + 1, 8, 4, 16); }

}  // namespace

int main() {
  test_every_element_is_added_once_in_the_stated_order();
  test_no_count_is_too_large();
  return 0;
}
