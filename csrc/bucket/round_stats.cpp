#include "bucket/round_stats.h"

#include <algorithm>
#include <numeric>

namespace pydist {

void RoundStats::meet(int64_t now_ns, int rank, const std::vector<int64_t>& busy_ns) {
  const auto last = std::max_element(busy_ns.begin(), busy_ns.end());
  // What end() took beyond the wait for the last rank is the exchange itself.
  const int64_t in_end_ns = std::max<int64_t>(0, now_ns - now_.backward_end_ns);
  const bool known = met_ns_ != 0;
  waited_ns_ = known ? std::min(in_end_ns, *last - busy_ns[rank]) : in_end_ns;
  if (known && busy_ns.size() > 1) count_late(busy_ns, last - busy_ns.begin());
  met_ns_ = now_ns;
  discounted_ns_ = 0;
}

void RoundStats::count_late(const std::vector<int64_t>& busy_ns, size_t last) {
  const int64_t sum_ns = std::accumulate(busy_ns.begin(), busy_ns.end(), int64_t{0});
  const auto size = static_cast<int64_t>(busy_ns.size());
  ++late_[last].num_last;
  late_[last].waited_ns += (size * busy_ns[last] - sum_ns) / (size - 1);
}

void RoundStats::finish(int64_t now_ns) {
  now_.finished_ns = now_ns;
  times_.forward_ns += forward_ns_;
  times_.backward_ns += now_.backward_end_ns - now_.backward_ns;
  times_.waiting_ns += waited_ns_;
  times_.reducing_ns += now_ns - now_.backward_end_ns - waited_ns_;
  times_.total_ns += now_ns - step_begin_ns_;
  forward_ns_ = 0;
  step_begin_ns_ = now_ns;
  last_ = now_;
}

}  // namespace pydist
