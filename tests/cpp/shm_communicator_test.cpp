// The communicator with ranks as threads of one process; its pure parts alone. Made for the
// sanitizers.
#include "collective/shm_communicator.h"

#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "collective/message_ring.h"
#include "memory_ranks.h"
#include "transport/arena.h"

using namespace pydist;

namespace {

// Memory in the arena or elsewhere.
template <class T>
class Array {
 public:
  Array(int64_t num_elements, bool in_arena) : num_elements_(num_elements), in_arena_(in_arena) {
    const size_t nbytes = std::max<size_t>(num_elements * sizeof(T), 1);
    data_ = static_cast<T*>(in_arena ? Arena::instance().allocate(nbytes) : ::operator new(nbytes));
  }
  ~Array() { in_arena_ ? Arena::instance().deallocate(data_) : ::operator delete(data_); }
  Array(const Array&) = delete;
  T& operator[](int64_t i) { return data_[i]; }
  T* data() { return data_; }
  Buffer buffer(DType dtype) { return {data_, num_elements_, dtype, in_arena_ ? data_ : nullptr}; }

 private:
  int64_t num_elements_;
  bool in_arena_;
  T* data_;
};

// Which ranks' memory is in the arena.
enum class Place { kNone, kAll, kEven };
bool in_arena(Place place, int rank) {
  return place == Place::kAll || (place == Place::kEven && rank % 2 == 0);
}
constexpr Place kPlaces[] = {Place::kNone, Place::kAll, Place::kEven};

// Inline, eager and their edges, one slot and its edges, several chunks, more than all buffers.
const std::vector<int64_t> kSizes = {0,    1,    3,     12,    13,    1000,
                                     1024, 1025, 20000, 65536, 65537, 300001};

void test_all_reduce() {
  for (int size : {1, 2, 3, 4}) {
    on_ranks(size, [&](ShmCommunicator& c) {
      for (Place place : kPlaces) {
        for (int64_t n : kSizes) {
          Array<float> array(n, in_arena(place, c.rank()));
          for (int64_t i = 0; i < n; ++i) array[i] = float(i % 1000 + 1000 * c.rank());
          c.all_reduce(array.buffer(DType::kFloat32), ReduceOp::kSum);
          for (int64_t i = 0; i < n; ++i) {
            CHECK(array[i] == float(i % 1000 * size + 1000 * size * (size - 1) / 2));
          }
        }
      }
    });
  }
}

// The same random numbers along every way: the same bits.
void test_same_bits() {
  const int64_t n = 100003;
  std::vector<uint16_t> results[3];
  for (Place place : kPlaces) {
    on_ranks(3, [&](ShmCommunicator& c) {
      std::mt19937 random(c.rank() + 1);
      Array<uint16_t> array(n, in_arena(place, c.rank()));
      for (int64_t i = 0; i < n; ++i) array[i] = 0x2000 + random() % 0x2000;
      std::vector<uint16_t> pieces(array.data(), array.data() + n);
      c.all_reduce(array.buffer(DType::kFloat16), ReduceOp::kMean);
      for (int64_t i = 0; i < n; i += 1001) {  // eager
        const int64_t length = std::min<int64_t>(1001, n - i);
        c.all_reduce({&pieces[i], length, DType::kFloat16}, ReduceOp::kMean);
      }
      CHECK(std::memcmp(pieces.data(), array.data(), n * 2) == 0);
      if (c.rank() == 2) results[int(place)].assign(array.data(), array.data() + n);
    });
  }
  CHECK(results[0] == results[1] && results[0] == results[2]);
}

void test_movement() {
  for (int size : {1, 2, 3, 4}) {
    on_ranks(size, [&](ShmCommunicator& c) {
      const int me = c.rank();
      for (Place place : kPlaces) {
        for (int64_t n : kSizes) {
          Array<int32_t> small(n, in_arena(place, me)), large(n * size, in_arena(place, me));
          for (int64_t i = 0; i < n; ++i) small[i] = int32_t(i * 10 + me);
          c.all_gather(small.buffer(DType::kInt32), large.buffer(DType::kInt32));
          for (int r = 0; r < size; ++r) {
            for (int64_t i = 0; i < n; ++i) CHECK(large[r * n + i] == int32_t(i * 10 + r));
          }
          for (int64_t i = 0; i < n * size; ++i) large[i] = int32_t(i + me);
          c.reduce_scatter(large.buffer(DType::kInt32), small.buffer(DType::kInt32),
                           ReduceOp::kSum);
          for (int64_t i = 0; i < n; ++i) {
            CHECK(small[i] == int32_t((me * n + i) * size + size * (size - 1) / 2));
          }
          const int root = size - 1;
          for (int64_t i = 0; i < n; ++i) small[i] = me == root ? int32_t(7 * i) : -1;
          c.broadcast(small.buffer(DType::kInt32), root);
          for (int64_t i = 0; i < n; ++i) CHECK(small[i] == int32_t(7 * i));
        }
      }
    });
  }
}

// Rank r sends (r + q) % 3 * n elements to rank q.
void test_all_to_all() {
  for (int size : {1, 2, 3, 4}) {
    on_ranks(size, [&](ShmCommunicator& c) {
      const int me = c.rank();
      for (Place place : kPlaces) {
        for (int64_t n : kSizes) {
          Collective call;
          call.operation = Operation::kAllToAll;
          int64_t total = 0;
          for (int q = 0; q < size; ++q) {
            call.input_splits.push_back((me + q) % 3 * n);
            call.output_splits.push_back((me + q) % 3 * n);
            total += (me + q) % 3 * n;
          }
          Array<int32_t> input(total, in_arena(place, me)), output(total, in_arena(place, me));
          int64_t at = 0;
          for (int q = 0; q < size; ++q) {
            for (int64_t i = 0; i < call.input_splits[q]; ++i)
              input[at++] = int32_t(i * 100 + me * 10 + q);
          }
          call.input = input.buffer(DType::kInt32);
          call.output = output.buffer(DType::kInt32);
          c.run(call);
          at = 0;
          for (int r = 0; r < size; ++r) {
            for (int64_t i = 0; i < call.output_splits[r]; ++i) {
              CHECK(output[at++] == int32_t(i * 100 + r * 10 + me));
            }
          }
        }
      }
    });
  }
}

void test_broadcast_many() {
  for (int64_t scale : {1, 1000, 300000}) {
    on_ranks(3, [&](ShmCommunicator& c) {
      Array<float> a(5 * scale, false), b(0, false), d(3 * scale, true);
      Array<uint8_t> e(7, false);
      const float start = c.rank() == 1 ? 0.f : -5.f;
      for (int64_t i = 0; i < 5 * scale; ++i) a[i] = start + float(i);
      for (int64_t i = 0; i < 3 * scale; ++i) d[i] = start - float(i);
      for (int i = 0; i < 7; ++i) e[i] = uint8_t(i + c.rank());
      c.broadcast_many({a.buffer(DType::kFloat32), b.buffer(DType::kFloat32),
                        d.buffer(DType::kFloat32), e.buffer(DType::kUInt8)},
                       1);
      for (int64_t i = 0; i < 5 * scale; ++i) CHECK(a[i] == float(i));
      for (int64_t i = 0; i < 3 * scale; ++i) CHECK(d[i] == -float(i));
      for (int i = 0; i < 7; ++i) CHECK(e[i] == i + 1);
    });
  }
}

void test_mismatch() {
  on_ranks(3, [&](ShmCommunicator& c) {
    std::vector<float> values(12, 1);
    const Buffer twelve{values.data(), 12, DType::kFloat32},
        ten{values.data(), 10, DType::kFloat32};
    for (int round = 0; round < 5; ++round) {
      std::string text = message_of<MismatchError>(
          [&] { c.rank() == 1 ? c.broadcast(ten, 0) : c.all_reduce(twelve, ReduceOp::kSum); });
      CHECK(contains(text, "called all_reduce(sum) of 12 float32"));
      CHECK(contains(text, "rank 1 (pid"));
      CHECK(contains(text, "called broadcast(from rank 0) of 10 float32"));
      CHECK(values[0] == float(round == 0 ? 1 : 3));
      std::vector<int64_t> integers(2);
      const auto invalid = [&] {
        c.rank() == 2 ? c.all_reduce({integers.data(), 2, DType::kInt64}, ReduceOp::kMean)
                      : c.all_reduce({integers.data(), 2, DType::kInt64}, ReduceOp::kSum);
      };
      if (c.rank() == 2) {
        CHECK(contains(message_of<UsageError>(invalid), "the mean of integers"));
      } else {
        CHECK(contains(message_of<MismatchError>(invalid), "invalid call (the mean of integers"));
      }
      const auto many = [&] {
        c.rank() == 0 ? c.broadcast_many({ten, twelve}, 0) : c.broadcast_many({twelve, ten}, 0);
      };
      CHECK(contains(message_of<MismatchError>(many), "in 2 pieces"));
      Collective call;
      call.operation = Operation::kAllToAll;
      call.input = call.output = {values.data(), 3, DType::kFloat32};
      call.input_splits = call.output_splits = {1, 1, 1};
      if (c.rank() == 0) call.input_splits = {1, 2, 0};
      CHECK(
          contains(message_of<MismatchError>([&] { c.run(call); }), "sends 2 elements to rank 1"));
      std::fill(values.begin(), values.end(), 1.f);
      c.all_reduce(twelve, ReduceOp::kSum);
      CHECK(values[11] == 3);
    }
  });
}

void test_requests() {
  on_ranks(3, [&](ShmCommunicator& c) {
    constexpr int kCount = 40;
    const int64_t n = 5000;
    std::vector<std::vector<float>> values(kCount, std::vector<float>(n));
    std::vector<std::shared_ptr<Request>> requests;
    for (int k = 0; k < kCount; ++k) {
      for (auto& value : values[k]) value = float(k + c.rank());
      const Collective call{
          Operation::kAllReduce, ReduceOp::kSum, 0, {}, {values[k].data(), n, DType::kFloat32}};
      if (k % 7 == 3) {
        c.run(call);
      } else {
        requests.push_back(c.start(call, nullptr));
      }
    }
    for (auto it = requests.rbegin(); it != requests.rend(); ++it) {
      (*it)->wait();
      CHECK((*it)->test());
    }
    CHECK(requests[0]->description() == "all_reduce(sum) of 5000 float32");
    for (int k = 0; k < kCount; ++k) {
      for (float value : values[k]) CHECK(value == float(3 * k + 3));
    }
    auto wrong = c.start({Operation::kBroadcast, ReduceOp::kSum, 9, {}, {}}, nullptr);
    message_of<UsageError>([&] { wrong->wait(); });
    message_of<UsageError>([&] { wrong->wait(); });
    c.barrier();
  });
}

void test_failure() {
  for (bool arena : {false, true}) {
    on_ranks(3, [&](ShmCommunicator& c) {
      Array<float> array(1 << 20, arena);
      c.barrier();
      if (c.rank() == 2) {
        c.board().fail("rank 2 raised for a test");
        return;
      }
      for (int k = 0; k < 2; ++k) {
        CHECK(contains(message_of<PeerError>(
                           [&] { c.all_reduce(array.buffer(DType::kFloat32), ReduceOp::kSum); }),
                       "rank 2 raised for a test"));
      }
      double value;
      message_of<PeerError>([&] { c.receive({&value, 1, DType::kFloat64}, 2, 0); });
    });
  }
}

void test_timeout() {
  on_ranks(
      2,
      [&](ShmCommunicator& c) {
        if (c.rank() == 1) return;
        float value = 1;
        const std::string text = message_of<TimeoutError>(
            [&] { c.all_reduce({&value, 1, DType::kFloat32}, ReduceOp::kSum); });
        CHECK(contains(text, "rank 1"));
        CHECK(contains(text, "all_reduce(sum) of 1 float32"));
      },
      0.5);
}

// Requests that nobody waits for, and a communicator that goes while one is in flight.
void test_abandoned_request() {
  on_ranks(2, [&](ShmCommunicator& c) {
    std::vector<float> values(10);
    if (c.rank() == 0)
      c.start({Operation::kAllReduce, ReduceOp::kSum, 0, {}, {values.data(), 10, DType::kFloat32}},
              nullptr);
  });
}

void test_ring() {
  RingControl control{};
  uint8_t data[16];
  RingWriter writer(&control, data, 16);
  RingReader reader(&control, data, 16);
  constexpr int kTotal = 100000;
  std::thread other([&] {
    std::mt19937 random(1);
    for (int i = 0; i < kTotal;) {
      uint8_t piece[32];
      const int wanted = std::min<int>(1 + random() % 32, kTotal - i);
      for (int k = 0; k < wanted; ++k) piece[k] = uint8_t((i + k) * 7);
      i += int(writer.write(piece, wanted));
      if (writer.free_nbytes() == 0) std::this_thread::yield();
    }
  });
  std::mt19937 random(2);
  for (int i = 0; i < kTotal;) {
    uint8_t piece[32];
    const int found = int(reader.read(piece, 1 + random() % 32));
    for (int k = 0; k < found; ++k) CHECK(piece[k] == uint8_t((i + k) * 7));
    i += found;
    if (found == 0) std::this_thread::yield();
  }
  other.join();
}

void test_call_word() {
  std::mt19937_64 random(1);
  for (int k = 0; k < 1000; ++k) {
    Call call;
    call.operation = static_cast<Operation>(random() % 8);
    call.dtype = static_cast<DType>(random() % kNumDTypes);
    call.op = static_cast<ReduceOp>(random() % kNumReduceOps);
    call.root = int(random() % Call::kMaxRanks);
    call.in_arena = random() % 2;
    call.num_elements = int64_t(random() % (Call::kMaxElements + 1));
    const Call same = Call::unpack(call.pack());
    CHECK(same.pack() == call.pack() && same.describe() == call.describe());
    CHECK(same.root == call.root && same.num_elements == call.num_elements);
    CHECK(same.operation == call.operation && same.dtype == call.dtype && same.op == call.op);
    CHECK(same.in_arena == call.in_arena);
  }
}

// Parts neither overlap nor leave the payload, and begin on cache lines.
void test_layout() {
  for (int size : {1, 2, 3, 8, 64, 192}) {
    const PayloadLayout layout(size);
    size_t end = 0;
    const auto place = [&](size_t begin, size_t nbytes) {
      CHECK(begin == end && begin % kCacheLineNbytes == 0);
      end = begin + nbytes;
      CHECK(end <= layout.total_nbytes());
    };
    const auto for_all = [&](auto&& visit) {
      for (uint64_t parity : {0, 1})
        for (int r = 0; r < size; ++r) visit(parity, r);
    };
    for (int r = 0; r < size; ++r) place(layout.claim(r), sizeof(Counter));
    for_all([&](uint64_t p, int r) { place(layout.call(p, r), sizeof(CallLine)); });
    for (int r = 0; r < size; ++r) place(layout.flags(r), sizeof(RankFlags));
    for_all(
        [&](uint64_t p, int r) { place(layout.splits(p, r), (size_t(size) * 16 + 63) / 64 * 64); });
    for_all([&](uint64_t p, int r) { place(layout.eager(p, r), PayloadLayout::kEagerNbytes); });
    for_all([&](uint64_t p, int r) { place(layout.slot(p, r), layout.slot_nbytes()); });
    for_all([&](uint64_t p, int r) { place(layout.result(p, r), layout.slice_nbytes()); });
    for (int a = 0; a < size; ++a) {
      for (int b = 0; b < size; ++b) {
        place(layout.ring(a, b), PayloadLayout::kRingControlNbytes + layout.ring_nbytes());
      }
    }
    CHECK(end == layout.total_nbytes());
  }
}

}  // namespace

int main() {
  test_call_word();
  test_layout();
  test_ring();
  test_all_reduce();
  test_same_bits();
  test_movement();
  test_all_to_all();
  test_broadcast_many();
  test_mismatch();
  test_requests();
  test_failure();
  test_timeout();
  test_abandoned_request();
  std::puts("communicator_test: passed");
}
