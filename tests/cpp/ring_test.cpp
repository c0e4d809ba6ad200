// The ring over shared memory: the same template as on a device, with a thread for each of its two
// queues, so that ThreadSanitizer sees an order that is missing.
#include "collective/ring.h"

#include <cmath>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "check.h"
#include "collective/convert.h"
#include "collective/reduce.h"
#include "collective/shm_communicator.h"
#include "memory_store.h"

using namespace pydist;

namespace {

// Runs what it is given, in order, on a thread of its own.
class Queue {
 public:
  Queue() : thread_([this] { run(); }) {}
  ~Queue() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_one();
  }

 private:
  void run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      if (task == nullptr) return;
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

class Event {
 public:
  void record(Queue* queue) {
    queue->push([this, number = ++num_recorded_] {
      const std::lock_guard<std::mutex> lock(mutex_);
      num_done_ = number;
      done_.notify_all();
    });
  }
  void block(Queue* queue) {
    queue->push([this, number = num_recorded_] {
      std::unique_lock<std::mutex> lock(mutex_);
      done_.wait(lock, [&] { return num_done_ >= number; });
    });
  }

 private:
  int num_recorded_ = 0;
  int num_done_ = 0;
  std::mutex mutex_;
  std::condition_variable done_;
};

// float32 that travels as `wire`.
class ShmTransport {
 public:
  ShmTransport(ShmCommunicator& communicator, const RingPlan& plan, DType wire)
      : communicator_(communicator),
        wire_(wire),
        segment_nbytes_(plan.segment_elements() * dtype_nbytes(wire)),
        apart_(delivers() ? segment_nbytes_ * plan.num_segments() : 0),
        places_(plan.segments_in_flight(), std::vector<uint8_t>(segment_nbytes_)),
        moved_(plan.segments_in_flight()),
        added_(plan.segments_in_flight()) {
    for (int index = 0; index < plan.num_segments(); ++index) {
      segments_.push_back(plan.segment(index));
    }
  }

  // Returns at once; the destructor waits. The places are used again by the next.
  void start(const RingPlan& plan, float* data) {
    data_ = data;
    run_ring(plan, *this);
  }

  Queue* mover() { return &mover_; }
  Queue* adder() { return &adder_; }
  Event& moved(int k) { return moved_[k]; }
  Event& added(int k) { return added_[k]; }
  bool delivers() const { return wire_ != DType::kFloat32; }

  void begin(Queue* queue) {
    if (!delivers()) return;
    queue->push([=, data = data_] {
      for (const RingSegment& segment : segments_) round(data + segment.begin, segment, data);
    });
  }
  void exchange(Queue* queue, RingSegment sent, RingSegment received, int k, bool adds) {
    queue->push([=, data = data_] {
      const int size = communicator_.size(), rank = communicator_.rank();
      uint8_t* to = adds ? places_[k].data() : travelling(data, received);
      if (sent.count > 0) {
        communicator_.send(bytes(travelling(data, sent), sent), (rank + 1) % size, 7);
      }
      if (received.count > 0) {
        communicator_.receive(bytes(to, received), (rank + size - 1) % size, 7);
      }
    });
  }
  void add(Queue* queue, RingSegment segment, int k, bool completes) {
    queue->push([=, data = data_] {
      const void* inputs[] = {places_[k].data(), travelling(data, segment)};
      void* output = travelling(data, segment);
      reduce(wire_, completes ? ReduceOp::kMean : ReduceOp::kSum,
             {inputs, 2, &output, 1, segment.count, communicator_.size()}, kIsa);
    });
  }
  void deliver(Queue* queue, RingSegment segment) {
    queue->push([=, data = data_] {
      convert(wire_, travelling(data, segment), DType::kFloat32, data + segment.begin,
              segment.count, kIsa);
    });
  }

 private:
  static constexpr Isa kIsa = Isa::kBaseline;

  uint8_t* travelling(float* data, RingSegment segment) {
    if (delivers()) return apart_.data() + segment.index * segment_nbytes_;
    return reinterpret_cast<uint8_t*>(data + segment.begin);
  }
  Buffer bytes(uint8_t* at, RingSegment segment) const {
    return {at, segment.count * static_cast<int64_t>(dtype_nbytes(wire_)), DType::kUInt8};
  }
  void round(const float* values, RingSegment segment, float* data) {
    convert(DType::kFloat32, values, wire_, travelling(data, segment), segment.count, kIsa);
  }

  ShmCommunicator& communicator_;
  float* data_ = nullptr;  // of the ring that is being started
  const DType wire_;
  const size_t segment_nbytes_;
  std::vector<RingSegment> segments_;
  std::vector<uint8_t> apart_;
  std::vector<std::vector<uint8_t>> places_;
  std::vector<Event> moved_;
  std::vector<Event> added_;
  Queue mover_;
  Queue adder_;  // the queues end first
};

void on_ranks(int size, const std::function<void(ShmCommunicator&)>& body) {
  MemoryStore store;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        BoardOptions options;
        options.rank = rank;
        options.size = size;
        options.timeout_s = 20;
        options.name = "the test group";
        body(*ShmCommunicator::create(store, options));
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d of %d: %s\n", rank, size, error.what());
        std::exit(1);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// In a row: the next begins while the one before is under way.
constexpr int kNumRounds = 2;

struct Case {
  int64_t count;
  int size;
  int in_flight;
  int64_t alignment;
  DType wire;
};

// In [-1, 1), of various magnitudes.
float element(int round, int rank, int64_t i) {
  uint64_t bits =
      (static_cast<uint64_t>(i) * 64 + rank * kNumRounds + round + 1) * 0x9e3779b97f4a7c15u;
  bits ^= bits >> 29;
  bits *= 0xbf58476d1ce4e5b9u;
  return std::ldexp(static_cast<float>(static_cast<int32_t>(bits >> 32)),
                    -31 - static_cast<int>(bits % 8));
}

float rounded(float value, DType wire) {
  uint32_t word = 0;
  convert(DType::kFloat32, &value, wire, &word, 1, Isa::kBaseline);
  convert(wire, &word, DType::kFloat32, &value, 1, Isa::kBaseline);
  return value;
}

// By the definition: in the order of ranks from the slice's own, rounded whenever it is sent on.
float ring_mean(const Case& c, int round, int64_t i) {
  const int64_t segment = RingPlan(c.count, c.size, 0, c.in_flight, c.alignment).segment_elements();
  const auto first = static_cast<int>(i / (segment * c.in_flight));
  float sum = rounded(element(round, first, i), c.wire);
  for (int j = 1; j < c.size; ++j) {
    sum += rounded(element(round, (first + j) % c.size, i), c.wire);
    sum = rounded(j == c.size - 1 ? sum * (1.0f / c.size) : sum, c.wire);
  }
  return sum;
}

// What csrc/collective/device_ring.h states.
double error_bound(const Case& c, int round, int64_t i) {
  const double unit = std::ldexp(1.0, c.wire == DType::kFloat32   ? -24
                                      : c.wire == DType::kFloat16 ? -11
                                                                  : -8);
  double magnitude = 0;
  for (int rank = 0; rank < c.size; ++rank) magnitude += std::fabs(element(round, rank, i));
  const double subnormal = c.wire == DType::kFloat16 ? std::ldexp(1.0, -25) : 0;
  return (1.01 * (c.size + 1) * unit * magnitude + 2 * c.size * subnormal) / c.size;
}

void check_ring(const Case& c) {
  on_ranks(c.size, [&](ShmCommunicator& communicator) {
    const int rank = communicator.rank();
    const RingPlan plan(c.count, c.size, rank, c.in_flight, c.alignment);
    std::vector<float> data[kNumRounds];
    for (int round = 0; round < kNumRounds; ++round) {
      for (int64_t i = 0; i < c.count; ++i) data[round].push_back(element(round, rank, i));
    }
    {
      ShmTransport transport(communicator, plan, c.wire);
      for (std::vector<float>& values : data) transport.start(plan, values.data());
    }
    for (int round = 0; round < kNumRounds; ++round) {
      for (int64_t i = 0; i < c.count; ++i) {
        const float found = data[round][i];
        CHECK(found == ring_mean(c, round, i));
        double exact = 0;
        for (int r = 0; r < c.size; ++r) exact += element(round, r, i);
        CHECK(std::fabs(found - exact / c.size) <= error_bound(c, round, i));
      }
    }
  });
}

}  // namespace

int main() {
  for (const int size : {2, 3, 4}) {
    for (const int in_flight : {1, 2, 3}) {
      for (const DType wire : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
        for (const int64_t count : {0, 1, 3, 17}) {
          check_ring({count, size, in_flight, 1, wire});
        }
        check_ring({777, size, in_flight, 32, wire});
        check_ring({1003, size, in_flight, 16, wire});
      }
    }
  }
  return 0;
}
