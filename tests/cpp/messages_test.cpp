// Messages between ranks that are threads, waited for and started; operations with a root;
// counters. Made for the sanitizers.
#include <algorithm>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "memory_ranks.h"

using namespace pydist;

namespace {

void test_messages() {
  on_ranks(3, [&](ShmCommunicator& c) {
    const int me = c.rank(), next = (me + 1) % 3, previous = (me + 2) % 3;
    for (int64_t n : {0, 1, 1000, 3000000}) {  // the last is many rings long; everybody sends first
      std::vector<int32_t> out(n), in(n);
      for (int64_t i = 0; i < n; ++i) out[i] = int32_t(i + me);
      const auto exchange = [&] {
        c.send({out.data(), n, DType::kInt32}, next, 5);
        CHECK(c.receive({in.data(), n, DType::kInt32}, previous, 5) == previous);
      };
      exchange();
      for (int64_t i = 0; i < n; ++i) CHECK(in[i] == int32_t(i + previous));
    }
    // Tags in another order than sent; any source.
    for (int tag : {1, 2, 3}) {
      const double value = 10 * me + tag;
      c.send({const_cast<double*>(&value), 1, DType::kFloat64}, next, tag);
    }
    for (int tag : {3, 1}) {
      double value = 0;
      c.receive({&value, 1, DType::kFloat64}, previous, tag);
      CHECK(value == 10 * previous + tag);
    }
    double value = 0;
    CHECK(c.receive({&value, 1, DType::kFloat64}, ShmCommunicator::kAnySource, 2) == previous);
    CHECK(value == 10 * previous + 2);
    c.barrier();
    // A refused message: the receiver raises, then the sender, once; everything goes on.
    if (me == 0) {
      const auto send = [&] { c.send({&value, 1, DType::kFloat64}, 1, 9); };
      send();
      c.barrier();
      CHECK(contains(message_of<MismatchError>(send),
                     "it expected 2 float32 with tag 9 and got 1 float64"));
      send();
    } else if (me == 1) {
      float two[2];
      const auto receive = [&] { c.receive({two, 2, DType::kFloat32}, 0, 9); };
      CHECK(contains(message_of<MismatchError>(receive), "sent 1 float64 with tag 9"));
      c.barrier();
      c.receive({&value, 1, DType::kFloat64}, 0, 9);
    } else {
      c.barrier();
    }
    c.barrier();
  });
}

// A sender that is blocked in a long message learns that it was refused, and cuts it short; so it
// does when another one was refused, and then the receiver waits on for the message of its tag.
void test_refused_while_sending() {
  on_ranks(2, [&](ShmCommunicator& c) {
    std::vector<uint8_t> bytes(8 << 20);
    const Buffer all{bytes.data(), int64_t(bytes.size()), DType::kUInt8};
    const Buffer five{bytes.data(), 5, DType::kUInt8};
    for (int round = 0; round < 20; ++round) {
      message_of<MismatchError>(
          [&] { c.rank() == 0 ? c.send(all, 1, 0) : (void)c.receive(five, 0, 0); });
      if (c.rank() == 0) {
        std::fill(bytes.begin(), bytes.end(), uint8_t(round + 1));
        bool raised = false;
        try {
          c.send(five, 1, 1);
          c.send(all, 1, 2);  // before, while or after the other is refused
        } catch (const MismatchError&) {
          raised = true;
          c.send(all, 1, 2);
        }
        c.barrier();
        if (!raised) message_of<MismatchError>([&] { c.send(five, 1, 3); });
      } else {
        std::thread other([&] {
          std::vector<uint8_t> found(8 << 20);
          c.receive({found.data(), int64_t(found.size()), DType::kUInt8}, 0, 2);
          for (uint8_t byte : found) CHECK(byte == round + 1);
        });
        message_of<MismatchError>([&] { c.receive({bytes.data(), 6, DType::kUInt8}, 0, 1); });
        other.join();
        c.barrier();
      }
    }
  });
}

void test_threads_receive_from_one_source() {
  on_ranks(2, [&](ShmCommunicator& c) {
    constexpr int kCount = 200;
    if (c.rank() == 0) {
      for (int i = 0; i < kCount; ++i) {
        for (int tag : {1, 0}) {
          std::vector<int32_t> values(5000, i * 2 + tag);
          c.send({values.data(), 5000, DType::kInt32}, 1, tag);
        }
      }
      return;
    }
    const auto receive = [&](int tag) {
      for (int i = 0; i < kCount; ++i) {
        std::vector<int32_t> values(5000);
        c.receive({values.data(), 5000, DType::kInt32}, 0, tag);
        CHECK(values.front() == i * 2 + tag && values.back() == i * 2 + tag);
      }
    };
    std::thread other([&] { receive(0); });
    receive(1);
    other.join();
  });
}

// Many messages of both kinds of call are under way between all pairs at once; per peer and tag
// they come in the order in which they were sent.
void test_asynchronous() {
  constexpr int kSize = 3, kRounds = 60, kTags = 2;
  on_ranks(kSize, [&](ShmCommunicator& c) {
    const auto length = [](int from, int to, int tag, int round) {
      return int64_t{1} << ((from + 2 * to + 3 * tag + round) % 18);
    };
    struct Message {
      std::vector<int32_t> values;
      std::shared_ptr<Request> request;
      int32_t expected;
    };
    std::vector<std::unique_ptr<Message>> sent, received;
    const auto message = [&](int64_t n, int32_t value) {
      auto made = std::make_unique<Message>();
      made->values.assign(n, value);
      return made;
    };
    for (int round = 0; round < kRounds; ++round) {
      for (int peer = 0; peer < kSize; ++peer) {
        if (peer == c.rank()) continue;
        for (int tag = 0; tag < kTags; ++tag) {
          const int64_t in = length(peer, c.rank(), tag, round);
          received.push_back(message(in, -1));
          received.back()->expected = 1000 * peer + 10 * round + tag;
          received.back()->request = c.start_receive(
              {received.back()->values.data(), in, DType::kInt32}, peer, tag, nullptr);
          const int64_t out = length(c.rank(), peer, tag, round);
          sent.push_back(message(out, 1000 * c.rank() + 10 * round + tag));
          const Buffer buffer{sent.back()->values.data(), out, DType::kInt32};
          if (round % 3 == 2 && out < 1000) {
            c.send(buffer, peer, tag);  // behind those that were started
          } else {
            sent.back()->request = c.start_send(buffer, peer, tag, nullptr);
          }
        }
      }
    }
    for (const auto& one : received) {
      one->request->wait();
      for (const int32_t value : one->values) CHECK(value == one->expected);
    }
    for (const auto& one : sent) {
      if (one->request) one->request->wait();
    }
    c.barrier();
    CHECK(c.counts().sent.calls == kRounds * kTags * (kSize - 1));
    CHECK(c.counts().received.calls == kRounds * kTags * (kSize - 1));
    uint64_t nbytes = 0;
    for (const auto& one : received) nbytes += 4 * one->values.size();
    CHECK(c.counts().received.nbytes == nbytes);
  });
}

// From any source, each message once, whoever is waited for in which way.
void test_any_source() {
  on_ranks(4, [&](ShmCommunicator& c) {
    if (c.rank() > 0) {
      for (int i = 0; i < 50; ++i) {
        const std::vector<int32_t> values(700, 100 * c.rank() + i);
        c.send({const_cast<int32_t*>(values.data()), 700, DType::kInt32}, 0, 4);
      }
      return c.barrier();
    }
    int next[4] = {};
    for (int i = 0; i < 150; ++i) {
      std::vector<int32_t> values(700);
      const Buffer buffer{values.data(), 700, DType::kInt32};
      int source;
      if (i % 2 == 0) {
        const auto request = c.start_receive(buffer, Communicator::kAnySource, 4, nullptr);
        request->wait();
        source = request->source();
      } else {
        source = c.receive(buffer, Communicator::kAnySource, 4);
      }
      CHECK(values.front() == 100 * source + next[source] && values.back() == values.front());
      ++next[source];
    }
    c.barrier();
  });
}

void test_failure_of_receives() {
  on_ranks(2, [&](ShmCommunicator& c) {
    double value = 0;
    const Buffer buffer{&value, 1, DType::kFloat64};
    std::vector<std::shared_ptr<Request>> requests;
    if (c.rank() == 0) {
      for (const int source : {1, Communicator::kAnySource}) {
        requests.push_back(c.start_receive(buffer, source, 0, nullptr));
      }
    }
    c.barrier();
    if (c.rank() == 1) return c.board().fail("rank 1 raised for a test");
    for (const auto& request : requests) {
      CHECK(contains(message_of<PeerError>([&] { request->wait(); }), "rank 1 raised for a test"));
    }
    message_of<PeerError>([&] { c.start_receive(buffer, 1, 0, nullptr); });
  });
}

// A wait that is given up leaves the receive as it is.
void test_impatient_wait() {
  on_ranks(2, [&](ShmCommunicator& c) {
    int32_t value = 7;
    const Buffer buffer{&value, 1, DType::kInt32};
    if (c.rank() == 0) {
      value = 0;
      const auto request = c.start_receive(buffer, 1, 0, nullptr);
      CHECK(contains(message_of<TimeoutError>([&] { request->wait(0.05); }), "goes on"));
      c.barrier();
      request->wait(10);
      CHECK(value == 7);
    } else {
      c.barrier();
      c.send(buffer, 0, 0);
    }
    c.barrier();
  });
}

void test_monitored_barrier() {
  on_ranks(4, [&](ShmCommunicator& c) {
    for (int i = 0; i < 3; ++i) c.monitored_barrier(10, true);
    for (const bool all : {true, false}) {
      if (c.rank() == 1 || c.rank() == 3) {
        c.barrier();
        message_of<TimeoutError>([&] { c.monitored_barrier(10, all); });  // too late
        c.barrier();
        continue;
      }
      const std::string text = message_of<TimeoutError>([&] { c.monitored_barrier(0.2, all); });
      CHECK(contains(text, "rank 1"));
      CHECK((text.find("rank 3") != std::string::npos) == all);
      c.barrier();
      c.barrier();
    }
    c.barrier();
  });
}

void test_rooted() {
  on_ranks(3, [&](ShmCommunicator& c) {
    const int me = c.rank();
    uint64_t calls = 0;
    for (const int64_t n : {0, 1, 5, 3000, 200001}) {
      for (int root = 0; root < 3; ++root) {
        std::vector<int32_t> mine(n), all(me == root ? 3 * n : 0), back(n), sum;
        for (int64_t i = 0; i < n; ++i) mine[i] = int32_t(i + 1000 * me);
        const Buffer whole{all.data(), int64_t(all.size()), DType::kInt32};
        const Buffer own{mine.data(), n, DType::kInt32};
        c.run({Operation::kGather, ReduceOp::kSum, root, own, whole});
        for (size_t i = 0; i < all.size(); ++i) CHECK(all[i] == int32_t(i % n + 1000 * (i / n)));
        c.run({Operation::kScatter, ReduceOp::kSum, root, whole, {back.data(), n, DType::kInt32}});
        CHECK(back == mine);
        sum = mine;
        c.run({Operation::kReduce, ReduceOp::kSum, root, {}, {sum.data(), n, DType::kInt32}});
        for (int64_t i = 0; i < n; ++i) {
          CHECK(sum[i] == (me == root ? int32_t(3 * i + 3000) : mine[i]));
        }
        ++calls;
        const auto counts = c.counts().collectives;
        CHECK(counts[size_t(Operation::kGather)].calls == calls);
        CHECK(counts[size_t(Operation::kReduce)].calls == calls);
      }
    }
    CHECK(c.counts().collectives[size_t(Operation::kReduce)].nbytes ==
          3 * 4 * (1 + 5 + 3000 + 200001));
  });
}

void test_bitwise() {
  on_ranks(3, [&](ShmCommunicator& c) {
    const uint8_t bits[] = {0b1100, 0b1010, 0b1001};
    const std::pair<ReduceOp, uint8_t> expected[] = {
        {ReduceOp::kBitAnd, 0b1000}, {ReduceOp::kBitOr, 0b1111}, {ReduceOp::kBitXor, 0b1111}};
    for (const auto& [op, result] : expected) {
      for (const int64_t n : {1, 4097}) {
        std::vector<int64_t> values(n, bits[c.rank()]);
        c.all_reduce({values.data(), n, DType::kInt64}, op);
        for (const int64_t value : values) CHECK(value == result);
      }
    }
    float real = 1;
    CHECK(contains(message_of<UsageError>(
                       [&] { c.all_reduce({&real, 1, DType::kFloat32}, ReduceOp::kBitOr); }),
                   "float32"));
  });
}

// Messages that nobody waits for, when the communicator ends.
void test_abandoned() {
  on_ranks(2, [&](ShmCommunicator& c) {
    const auto memory = std::make_shared<std::vector<uint8_t>>(4 << 20);
    const Buffer buffer{memory->data(), int64_t(memory->size()), DType::kUInt8};
    if (c.rank() == 0) c.start_send(buffer, 1, 0, memory);
    if (c.rank() == 1) c.start_receive(buffer, 0, 1, memory);
    c.barrier();
  });
}

}  // namespace

int main() {
  test_messages();
  test_refused_while_sending();
  test_threads_receive_from_one_source();
  test_asynchronous();
  test_any_source();
  test_failure_of_receives();
  test_impatient_wait();
  test_monitored_barrier();
  test_rooted();
  test_bitwise();
  test_abandoned();
  std::puts("messages_test: passed");
}
