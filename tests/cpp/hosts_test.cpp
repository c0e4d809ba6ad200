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
#include "memory_store.h"
#include "transport/arena.h"

using namespace pydist;

namespace {

using Hosts = std::vector<std::vector<int>>;
const std::vector<Hosts> kHosts = {
    {{0, 1}, {2, 3}}, {{0, 2}, {1, 3}}, {{0, 1}, {2}}, {{0}, {1}, {2}}, {{0, 1, 2}, {3}, {4, 5}}};

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

// -- a network of threads ------------------------------------------------------------------------

// Operations of all ranks, paired by their order; each copies what it gets once all have come.
class MemoryWire {
 public:
  explicit MemoryWire(int size) : size_(size), counts_(size, 0) {}
  struct Entry {
    SharedBytes from;
    std::vector<int64_t> sent;  // by rank
  };
  struct Meeting {
    std::vector<Entry> entries;
    int num_come = 0;
    int num_left = 0;
  };
  int size() const { return size_; }

  uint64_t come(int rank, Entry entry) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t number = counts_[rank]++;
    Meeting& meeting = meetings_[number];
    meeting.entries.resize(size_);
    // A copy, as of what has gone into a socket.
    int64_t nbytes = 0;
    for (const int64_t part : entry.sent) nbytes += part;
    SharedBytes copy = make_shared_bytes(nbytes);
    if (nbytes > 0) std::memcpy(copy.get(), entry.from.get(), nbytes);
    entry.from = copy;
    meeting.entries[rank] = std::move(entry);
    ++meeting.num_come;
    return number;
  }
  bool all_have_come(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return meetings_.at(number).num_come == size_;
  }
  std::vector<Entry> leave(uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Meeting& meeting = meetings_.at(number);
    std::vector<Entry> entries = meeting.entries;
    if (++meeting.num_left == size_) meetings_.erase(number);
    return entries;
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::vector<uint64_t> counts_;
  std::map<uint64_t, Meeting> meetings_;
};

class MemoryNetwork final : public Network {
 public:
  MemoryNetwork(std::shared_ptr<MemoryWire> wire, int rank) : wire_(std::move(wire)), rank_(rank) {}
  int rank() const override { return rank_; }
  int size() const override { return wire_->size(); }
  Started all_to_all(const SharedBytes& from, const SharedBytes& to, size_t nbytes) override {
    const std::vector<int64_t> equal(size(), static_cast<int64_t>(nbytes));
    return all_to_all(from, equal, to, equal);
  }
  Started all_to_all(const SharedBytes& from, std::vector<int64_t> sent, const SharedBytes& to,
                     std::vector<int64_t> received) override {
    return start(from, std::move(sent), [to, received, rank = rank_](const auto& entries) {
      uint8_t* target = to.get();
      for (size_t r = 0; r < entries.size(); ++r) {
        int64_t begin = 0;
        for (int k = 0; k < rank; ++k) begin += entries[r].sent[k];
        CHECK(entries[r].sent[rank] == received[r]);
        std::memcpy(target, entries[r].from.get() + begin, received[r]);
        target += received[r];
      }
    });
  }
  Started all_gather(const SharedBytes& from, const SharedBytes& to, size_t nbytes) override {
    return start(from, {static_cast<int64_t>(nbytes)}, [to, nbytes](const auto& entries) {
      for (size_t r = 0; r < entries.size(); ++r) {
        CHECK(entries[r].sent[0] == static_cast<int64_t>(nbytes));
        std::memcpy(to.get() + r * nbytes, entries[r].from.get(), nbytes);
      }
    });
  }
  Started broadcast(const SharedBytes& data, size_t nbytes, int root) override {
    return start(data, {static_cast<int64_t>(nbytes)}, [data, nbytes, root](const auto& entries) {
      std::memcpy(data.get(), entries[root].from.get(), nbytes);
    });
  }

 private:
  using Take = std::function<void(const std::vector<MemoryWire::Entry>&)>;
  class Meeting final : public Exchange {
   public:
    Meeting(std::shared_ptr<MemoryWire> wire, uint64_t number, Take take)
        : wire_(std::move(wire)), number_(number), take_(std::move(take)) {}
    bool test() override { return wire_->all_have_come(number_); }
    void finish() override { take_(wire_->leave(number_)); }

   private:
    std::shared_ptr<MemoryWire> wire_;
    uint64_t number_;
    Take take_;
  };
  Started start(const SharedBytes& from, std::vector<int64_t> sent, Take take) {
    const uint64_t number = wire_->come(rank_, {from, std::move(sent)});
    return std::make_unique<Meeting>(wire_, number, std::move(take));
  }

  std::shared_ptr<MemoryWire> wire_;
  const int rank_;
};

class StoreOf final : public Store {
 public:
  StoreOf(MemoryStore& store, std::string prefix) : store_(store), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override {
    store_.set(prefix_ + key, value);
  }
  std::string get(const std::string& key) override { return store_.get(prefix_ + key); }
  int64_t add(const std::string& key, int64_t amount) override {
    return store_.add(prefix_ + key, amount);
  }
  bool check(const std::string& key) override { return store_.check(prefix_ + key); }

 private:
  MemoryStore& store_;
  const std::string prefix_;
};

using Body = std::function<void(HostsCommunicator&, HostsTeam&)>;

// body(communicator, team) on every rank, each a thread.
void on_hosts(const Hosts& hosts, const Body& body, double timeout_s = 20) {
  MemoryStore store;
  const HostLayout layout(hosts);
  std::vector<std::shared_ptr<MemoryWire>> lanes;
  for (int k = 0; k < layout.num_lanes(); ++k) {
    lanes.push_back(std::make_shared<MemoryWire>(layout.num_hosts()));
  }
  const auto flat = std::make_shared<MemoryWire>(layout.num_ranks());
  HostsOptions options;
  options.name = "the test group";
  options.timeout_s = timeout_s;
  for (int r = 0; r < layout.num_ranks(); ++r) options.ranks.push_back(concat("rank ", r));
  for (int h = 0; h < layout.num_hosts(); ++h) options.host_names.push_back(concat("host-", h));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < layout.num_ranks(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const int host = layout.host_of(rank);
        BoardOptions board;
        board.rank = layout.local_of(rank);
        board.size = layout.num_ranks_of(host);
        board.waits_fail_group = false;
        for (const int r : layout.ranks_of(host)) board.names.push_back(options.ranks[r]);
        StoreOf local(store, concat("host", host, "/"));
        HostsTeam team{layout, rank, ShmCommunicator::create(local, board), nullptr,
                       std::make_shared<MemoryNetwork>(flat, rank)};
        if (layout.has_lane(rank)) {
          team.lane = std::make_shared<MemoryNetwork>(lanes[layout.local_of(rank)], host);
        }
        HostsCommunicator communicator(team, std::make_unique<StoreOf>(store, "watch/"), nullptr,
                                       options);
        body(communicator, team);
        if (!communicator.board().failed()) communicator.barrier();
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        std::exit(1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
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
  const int64_t n = 100003;
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
          for (int64_t i = 0; i < n; i += 211) {
            call.output = {pieces.data() + i * dtype_nbytes(dtype), std::min<int64_t>(211, n - i),
                           dtype};
            c.run(call);
          }
          CHECK(pieces == whole);
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

template <class ErrorType>
std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  CHECK(!"the error was not raised");
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "'%s' is not in '%s'\n", part.c_str(), text.c_str());
  return false;
}

void test_mismatches() {
  on_hosts(kHosts[2], [&](HostsCommunicator& c, HostsTeam&) {
    std::vector<float> array(3000, 1.0f);
    const int64_t count = c.rank() == 2 ? 2000 : 3000;
    const std::string text = message_of<MismatchError>(
        [&] { c.all_reduce({array.data(), count, DType::kFloat32}, ReduceOp::kSum); });
    CHECK(contains(text, "rank 2 called all_reduce(sum) of 2000 float32"));
    CHECK(array[0] == 1.0f);
    if (c.rank() == 1) {
      message_of<UsageError>([&] { c.broadcast({array.data(), 3000, DType::kFloat32}, 7); });
    } else {
      CHECK(contains(message_of<MismatchError>([&] { c.barrier(); }), "root 7 of 3 ranks"));
    }
    c.all_reduce({array.data(), 3000, DType::kFloat32}, ReduceOp::kSum);  // goes on
    CHECK(array[2999] == 3.0f);
  });
}

// A rank that never comes is named on all others, wherever it is.
void test_timeouts() {
  for (const int absent : {0, 1, 2, 3}) {
    on_hosts(
        kHosts[0],
        [&](HostsCommunicator& c, HostsTeam&) {
          if (c.rank() == absent) {
            for (int i = 0; i < 1000 && !c.board().failed(); ++i) {
              std::this_thread::sleep_for(std::chrono::milliseconds(20));
            }
            CHECK(c.board().failed());
            return;
          }
          std::string text;
          try {
            c.barrier();
            CHECK(!"nobody was missed");
          } catch (const TimeoutError& error) {
            text = error.what();
          } catch (const PeerError& error) {
            text = error.what();
          }
          CHECK(contains(text, concat("s for rank ", absent, " in barrier")));
        },
        0.5);
  }
}

// A failure reaches the ranks of other hosts, waiting or not.
void test_failures() {
  on_hosts(kHosts[0], [&](HostsCommunicator& c, HostsTeam&) {
    if (c.rank() == 3) return c.fail("rank 3 has had enough");
    CHECK(contains(message_of<PeerError>([&] { c.barrier(); }), "rank 3 has had enough"));
    CHECK(contains(message_of<PeerError>([&] { c.barrier(); }), "rank 3 has had enough"));
  });
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
  test_mismatches();
  test_timeouts();
  test_failures();
  return 0;
}
