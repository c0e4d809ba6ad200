// The communicator over several hosts, with ranks as threads and a network within the process: the
// plan, the arithmetic, the operations. Made for the sanitizers.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "collective/convert.h"
#include "collective/hosts_all_reduce.h"
#include "collective/hosts_communicator.h"
#include "memory_hosts.h"
#include "transport/arena.h"

using namespace pydist;

namespace {

// -- the plan ------------------------------------------------------------------------------------

// Shares cover the buffer once, and slices cover shares.
void test_plan() {
  for (int hosts : {2, 3, 5}) {
    for (int lanes : {1, 2, 7}) {
      for (int64_t n :
           {int64_t{1}, int64_t{63}, int64_t{1000}, int64_t{300001}, int64_t{9000001}}) {
        const HostsPlan plan(n, 4, hosts, lanes);
        int64_t at = 0;
        for (int64_t t = 0; t < plan.num_segments(); ++t) {
          CHECK(plan.segment(t).begin == at);
          for (int lane = 0; lane < lanes; ++lane) {
            const HostsSpan share = plan.share(t, lane);
            CHECK(share.count == 0 || share.begin == at);
            at += share.count;
            CHECK(share.count <= plan.slice_elements(t) * hosts);
            CHECK(share.count <= plan.sent_elements(t));
          }
        }
        CHECK(at == n);
      }
    }
  }
  CHECK(HostsPlan(100, 4, 2, 2).num_segments() == 1);
  CHECK(HostsPlan(100, 4, 3, 1).adds_everywhere(0));
  CHECK(!HostsPlan(1 << 20, 4, 3, 1).adds_everywhere(0));
  CHECK(HostsPlan(1 << 20, 4, 2, 1).adds_everywhere(0));
}

void test_layout() {
  const HostLayout layout({{0, 2, 5}, {1, 3}, {4, 6, 7}});
  CHECK(layout.num_ranks() == 8 && layout.num_hosts() == 3 && layout.num_lanes() == 2);
  CHECK(layout.most_ranks() == 3 && !layout.is_even());
  CHECK(layout.host_of(5) == 0 && layout.local_of(5) == 2 && !layout.has_lane(5));
  CHECK(layout.host_of(3) == 1 && layout.local_of(3) == 1 && layout.has_lane(3));
}

// -- sums ----------------------------------------------------------------------------------------

const std::vector<int64_t> kSizes = {0, 1, 100, 246, 247, 5000, 300001};

void test_sums() {
  for (const Hosts& hosts : kHosts) {
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam&) {
      const int n = c.size();
      for (const int64_t count : kSizes) {
        std::vector<float> array(count);
        const auto fill = [&] {
          for (int64_t i = 0; i < count; ++i) array[i] = float(i % 1000 + 1000 * c.rank());
        };
        const Buffer buffer{array.data(), count, DType::kFloat32};
        fill();
        c.all_reduce(buffer, ReduceOp::kSum);
        for (int64_t i = 0; i < count; ++i) {
          CHECK(array[i] == float(i % 1000 * n + 1000 * n * (n - 1) / 2));
        }
        fill();
        c.all_reduce(buffer, ReduceOp::kMax);
        for (int64_t i = 0; i < count; ++i) CHECK(array[i] == float(i % 1000 + 1000 * (n - 1)));
        fill();
        c.run({Operation::kReduce, ReduceOp::kMin, n - 1, {}, buffer});
        for (int64_t i = 0; i < count; ++i) {
          const int from = c.rank() == n - 1 ? 0 : c.rank();
          CHECK(array[i] == float(i % 1000 + 1000 * from));
        }
      }
    });
  }
}

// What the plan's cut cannot change: the same numbers in pieces (which travel with the calls), in
// small segments, and as a whole; and all ranks have the same.
void test_same_bits() {
  const int64_t n = 100003, first = 20 * 211;
  for (const Hosts& hosts : kHosts) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      for (const bool narrow : {false, true}) {
        if (narrow && dtype != DType::kFloat32) continue;
        std::vector<std::vector<uint8_t>> results(HostLayout(hosts).num_ranks());
        on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam& team) {
          std::mt19937 random(c.rank() + 1);
          std::normal_distribution<float> normal;
          std::vector<float> values(n);
          for (float& value : values) value = normal(random);
          const size_t nbytes = n * dtype_nbytes(dtype);
          std::vector<uint8_t> whole(nbytes);
          if (dtype == DType::kFloat32) {
            std::memcpy(whole.data(), values.data(), nbytes);
          } else {
            convert(DType::kFloat32, values.data(), dtype, whole.data(), n, Isa::kBaseline);
          }
          std::vector<uint8_t> pieces = whole, segments = whole;
          Collective call{Operation::kAllReduce, ReduceOp::kMean, 0, {}, {}};
          if (narrow) call.wire = DType::kBFloat16;
          call.output = {whole.data(), n, dtype};
          c.run(call);
          for (int64_t i = 0; i < first; i += 211) {
            call.output = {pieces.data() + i * dtype_nbytes(dtype), 211, dtype};
            c.run(call);
          }
          CHECK(std::memcmp(pieces.data(), whole.data(), first * dtype_nbytes(dtype)) == 0);
          call.output = {segments.data(), n, dtype};
          HostsAllReduce cut(team, call, [] { return std::string("the test"); });
          cut.set_segment_elements(6000);
          cut.run();
          CHECK(segments == whole);
          results[c.rank()] = whole;
        });
        for (const auto& result : results) CHECK(result == results[0]);
      }
    }
  }
}

// Means of float16 that neither overflow nor underflow, on hosts of any size.
void test_extreme_means() {
  for (const Hosts& hosts : kHosts) {
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam&) {
      for (const uint16_t bits : {0x78e2, 0x0001}) {  // 40000, 2^-24
        for (const int64_t count : {7, 20000}) {
          std::vector<uint16_t> array(count, bits);
          c.all_reduce({array.data(), count, DType::kFloat16}, ReduceOp::kMean);
          for (const uint16_t found : array) CHECK(found == bits);
        }
      }
    });
  }
}

void test_divisor() {
  for (const Hosts& hosts : kHosts) {
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam&) {
      for (const int divisor : {1, 2, 3, 4}) {
        for (const int64_t count : {5, 3000}) {
          std::vector<double> array(count, 12.0 * (c.rank() + 1));
          Collective call{Operation::kAllReduce, ReduceOp::kMean, 0, {}, {}};
          call.output = {array.data(), count, DType::kFloat64};
          call.divisor = divisor;
          c.run(call);
          const double expected = 6.0 * c.size() * (c.size() + 1) / divisor;
          for (const double found : array) CHECK(std::abs(found - expected) < 1e-12 * expected);
        }
      }
    });
  }
}

// -- the rest ------------------------------------------------------------------------------------

void test_movement() {
  for (const Hosts& hosts : kHosts) {
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam&) {
      const int n = c.size();
      const int me = c.rank();
      for (const int64_t count : {int64_t{0}, int64_t{3}, int64_t{5000}}) {
        std::vector<int32_t> mine(count), all(count * n);
        for (int64_t i = 0; i < count; ++i) mine[i] = int(i) * 100 + me;
        c.all_gather({mine.data(), count, DType::kInt32}, {all.data(), count * n, DType::kInt32});
        for (int64_t i = 0; i < count * n; ++i) CHECK(all[i] == i % count * 100 + i / count);
        for (int root = 0; root < n; ++root) {
          std::vector<int32_t> copy = mine;
          c.broadcast({copy.data(), count, DType::kInt32}, root);
          for (int64_t i = 0; i < count; ++i) CHECK(copy[i] == i * 100 + root);
          std::vector<int32_t> pieces = mine;
          c.broadcast_many({{pieces.data(), count / 2, DType::kInt32},
                            {pieces.data() + count / 2, count - count / 2, DType::kInt32}},
                           root);
          CHECK(pieces == copy);
          std::vector<int32_t> gathered(me == root ? count * n : 0);
          c.run({Operation::kGather,
                 ReduceOp::kSum,
                 root,
                 {mine.data(), count, DType::kInt32},
                 {gathered.data(), int64_t(gathered.size()), DType::kInt32}});
          if (me == root) CHECK(gathered == all);
          std::vector<int32_t> back(count);
          c.run({Operation::kScatter,
                 ReduceOp::kSum,
                 root,
                 {gathered.data(), int64_t(gathered.size()), DType::kInt32},
                 {back.data(), count, DType::kInt32}});
          CHECK(back == mine);
        }
        std::vector<int32_t> input(count * n), part(count);
        for (int64_t i = 0; i < count * n; ++i) input[i] = int(i) * (me + 1);
        c.reduce_scatter({input.data(), count * n, DType::kInt32},
                         {part.data(), count, DType::kInt32}, ReduceOp::kSum);
        for (int64_t i = 0; i < count; ++i) CHECK(part[i] == (me * count + i) * n * (n + 1) / 2);
      }
    });
  }
}

// Rank r sends r + 1 + s elements to rank s.
void test_all_to_all() {
  for (const Hosts& hosts : kHosts) {
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam&) {
      Collective call;
      call.operation = Operation::kAllToAll;
      std::vector<int64_t> input, expected;
      for (int r = 0; r < c.size(); ++r) {
        call.input_splits.push_back(c.rank() + 1 + r);
        call.output_splits.push_back(r + 1 + c.rank());
        for (int i = 0; i < c.rank() + 1 + r; ++i) input.push_back(100 * c.rank() + r);
        for (int i = 0; i < r + 1 + c.rank(); ++i) expected.push_back(100 * r + c.rank());
      }
      std::vector<int64_t> output(expected.size());
      call.input = {input.data(), int64_t(input.size()), DType::kInt64};
      call.output = {output.data(), int64_t(output.size()), DType::kInt64};
      c.run(call);
      CHECK(output == expected);
    });
  }
}

// What a host's ranks add up to is not rounded before that.
void test_narrow_wire() {
  for (const Hosts& hosts : kHosts) {
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam& team) {
      const auto num_hosts = static_cast<float>(team.layout.num_hosts());
      const float ulp = 1.0f / 128;  // of bfloat16 at 1
      const bool is_alone = team.local->size() == 1;
      const float mine[] = {is_alone ? 1 + ulp : 1 + ulp / 2, ulp / 2, 0};
      for (const int64_t count : {int64_t{8}, int64_t{50000}}) {
        std::vector<float> wide(count, mine[team.local_rank()]), narrow = wide;
        Collective call;
        call.operation = Operation::kAllReduce;
        call.output = {wide.data(), count, DType::kFloat32};
        MemoryWire* lane = team.lane ? &static_cast<MemoryNetwork&>(*team.lane).wire() : nullptr;
        c.barrier();
        const int64_t before = lane ? lane->nbytes() : 0;
        c.run(call);
        c.barrier();
        const int64_t between = lane ? lane->nbytes() : 0;
        call.output.data = narrow.data();
        call.wire = DType::kBFloat16;
        c.run(call);
        c.barrier();
        const int64_t after = lane ? lane->nbytes() : 0;
        const float sum = num_hosts * (1 + ulp);
        float rounded = 0;
        uint16_t bits = 0;
        convert(DType::kFloat32, &sum, DType::kBFloat16, &bits, 1, Isa::kBaseline);
        convert(DType::kBFloat16, &bits, DType::kFloat32, &rounded, 1, Isa::kBaseline);
        for (const float found : wide) CHECK(found == sum);
        for (const float found : narrow) CHECK(found == rounded);
        if (count > 8 && lane) CHECK(10 * (after - between) < 6 * (between - before));
      }
    });
  }
}

// Started ones, in the order of calls beside those that wait; each host is slow now and then.
void test_requests() {
  for (const Hosts& hosts : kHosts) {
    on_hosts(hosts, [&](HostsCommunicator& c, HostsTeam& team) {
      constexpr int kRequests = 12;
      const int n = c.size();
      std::vector<std::vector<float>> arrays;
      std::vector<std::shared_ptr<Request>> requests;
      for (int k = 0; k < kRequests; ++k) {
        const int64_t count = k % 2 == 0 ? 10 : 20000;
        if (k % team.layout.num_hosts() == team.host()) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
        }
        arrays.emplace_back(count, float(k + c.rank()));
        Collective call;
        call.operation = Operation::kAllReduce;
        call.output = {arrays.back().data(), count, DType::kFloat32};
        requests.push_back(c.start(call, nullptr));
        if (k % 5 == 4) c.barrier();
      }
      for (int k = 0; k < kRequests; ++k) {
        requests[k]->wait();
        CHECK(arrays[k].front() == float(n * k + n * (n - 1) / 2));
        CHECK(arrays[k].back() == arrays[k].front());
      }
      const CommunicatorCounts counts = c.counts();
      const auto& sums = counts.collectives[size_t(Operation::kAllReduce)];
      CHECK(sums.calls == kRequests && sums.nbytes == kRequests / 2 * 20010 * 4);
      CHECK(counts.collectives[size_t(Operation::kBarrier)].calls == 2);
    });
  }
}

}  // namespace

int main() {
  test_plan();
  test_layout();
  test_sums();
  test_same_bits();
  test_extreme_means();
  test_divisor();
  test_movement();
  test_all_to_all();
  test_narrow_wire();
  test_requests();
  return 0;
}
