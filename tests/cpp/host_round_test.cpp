// Rounds over several hosts, with ranks as threads: any order of units, in memory of their own or
// of the caller's, and a rank that fails. Made for the sanitizers.
#include "bucket/host_round.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "check.h"
#include "memory_hosts.h"

using namespace pydist;

namespace {

constexpr int kNumRounds = 6;
const std::vector<int64_t> kSizes = {3, 200, 5000, 300001};

RoundOptions options_of_test() {
  RoundOptions options;
  for (size_t u = 0; u < kSizes.size(); ++u) {
    options.units.push_back(Unit{DType::kFloat32, kSizes[u], true, {{static_cast<int>(u), 0}}});
    options.unit_names.push_back("a unit");
  }
  options.num_parameters = static_cast<int>(kSizes.size());
  return options;
}

std::shared_ptr<HostsCommunicator> borrowed(HostsCommunicator& communicator) {
  return std::shared_ptr<HostsCommunicator>(std::shared_ptr<void>(), &communicator);
}

// Small integers, which every type holds.
float value(int rank, int round, int unit, int64_t i) {
  return static_cast<float>((rank + 2 * round + 3 * unit + i) % 16);
}

class RankRun {
 public:
  RankRun(HostsCommunicator& communicator, std::optional<DType> wire)
      : wire_(wire), round_(borrowed(communicator), wire, options_of_test()) {}

  void run() {
    std::mt19937 random(round_.rank());
    for (number_ = 0; number_ < kNumRounds; ++number_) {
      std::vector<int> order = {0, 1, 2, 3};
      std::shuffle(order.begin(), order.end(), random);
      step(order);
    }
  }

  void fail() {
    if (round_.rank() == 1) {
      round_.begin(0);
      round_.publish(0, round_.unit_memory(0));
      return round_.fail("rank 1 raised on purpose");
    }
    try {
      step({3, 2, 1, 0});
      CHECK(false);
    } catch (const PeerError& error) {
      CHECK(std::string(error.what()).find("rank 1 raised on purpose") != std::string::npos);
    }
    CHECK(round_.drain());
  }

 private:
  // The last unit is postponed in every other round.
  void step(const std::vector<int>& order) {
    const bool postpones = number_ % 2 == 1;
    const int last = static_cast<int>(kSizes.size()) - 1;
    round_.begin(divisor());
    if (postpones) round_.postpone(last);
    RoundRecord record(last + 1);
    record.used.set(round_.rank() % (last + 1));
    for (const int unit : order) {
      if (!postpones || unit != last) give(unit);
    }
    const std::vector<RoundRecord>& records = round_.end(record);
    for (int r = 0; r < round_.size(); ++r) CHECK(records[r].used.test(r % (last + 1)));
    if (postpones) give(last);
    round_.finish();
    for (int unit = 0; unit <= last; ++unit) check_mean(unit);
  }

  int divisor() const { return number_ % 3 == 2 ? 4 : 0; }

  void give(int unit) {
    auto* data = static_cast<float*>(round_.unit_memory(unit));
    for (int64_t i = 0; i < kSizes[unit]; ++i) data[i] = value(round_.rank(), number_, unit, i);
    round_.publish(unit, data);
  }

  void check_mean(int unit) {
    const auto* data = static_cast<const float*>(round_.unit_memory(unit));
    const int by = divisor() > 0 ? divisor() : round_.size();
    // A host's mean and the mean of all are rounded once each.
    const float tolerance = wire_ ? 2.0f / 128 : 1e-6f;
    for (int64_t i = 0; i < kSizes[unit]; ++i) {
      float sum = 0;
      for (int r = 0; r < round_.size(); ++r) sum += value(r, number_, unit, i);
      CHECK(std::abs(data[i] - sum / by) <= tolerance * (1 + sum / by));
    }
  }

  const std::optional<DType> wire_;
  HostRound round_;
  int number_ = 0;
};

}  // namespace

int main() {
  for (const Hosts& hosts : kHosts) {
    for (const std::optional<DType> wire : {std::optional<DType>(), {DType::kBFloat16}}) {
      on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam&) { RankRun(c, wire).run(); });
    }
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam&) { RankRun(c, std::nullopt).fail(); });
  }
  return 0;
}
