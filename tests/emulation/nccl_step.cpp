#include "nccl_step.h"

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "faults.h"
#include "nccl_arithmetic.h"
#include "options.h"

namespace pydist::emulation {

namespace {

using SteadyClock = std::chrono::steady_clock;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

Signature signature_of(const CommState& comm, const NcclCall& call) {
  Signature signature;
  signature.kind = static_cast<int>(call.kind);
  signature.dtype = call.dtype;
  signature.op = std::min<int>(call.op, nccl::kAvg + 1);  // scales may differ
  signature.root = call.root;
  signature.count = call.count;
  std::snprintf(signature.text, sizeof signature.text, "rank %d calls %s", comm.rank,
                call.what.c_str());
  return signature;
}

// One call's progress. Reduced is what all ranks have posted; each rank does it for itself.
class Collective {
 public:
  Collective(CommState& comm, const NcclCall& call)
      : comm_(comm), call_(call), element_(nbytes_of(call.dtype)) {
    const bool sends_all = call.kind == CallKind::kReduceScatter;
    chunk_ = kChunkNbytes / element_ / (sends_all ? comm.size : 1);
    signature_ = signature_of(comm, call);
  }

  bool advance() {
    while (done_ < call_.count) {
      if (!is_posted_ && !post()) return false;
      if (!take()) return false;
    }
    return true;
  }

 private:
  Board& board(int rank) { return comm_.segment->boards[rank]; }
  size_t now() const { return std::min(chunk_, call_.count - done_); }
  const char* input(size_t element) const {
    return static_cast<const char*>(call_.from) + element * element_;
  }
  char* output(size_t element) const { return static_cast<char*>(call_.to) + element * element_; }

  bool post() {
    const uint64_t number = comm_.num_chunks + 1;
    for (int rank = 0; rank < comm_.size; ++rank) {
      if (board(rank).taken.load(kAcquire) + 2 < number) return false;
    }
    Board& mine = board(comm_.rank);
    mine.signatures[number % 2] = signature_;
    char* slot = mine.data[number % 2];
    if (call_.kind == CallKind::kReduceScatter) {
      for (int rank = 0; rank < comm_.size; ++rank) {
        bring(input(rank * call_.count + done_), slot + rank * now() * element_);
      }
    } else if (call_.kind != CallKind::kBroadcast || call_.root == comm_.rank) {
      bring(input(done_), slot);
    }
    mine.posted.store(number, kRelease);
    comm_.num_chunks = number;
    is_posted_ = true;
    return true;
  }

  void bring(const char* from, char* to) const {
    const bool reduces =
        call_.kind == CallKind::kAllReduce || call_.kind == CallKind::kReduceScatter;
    double scale = call_.op > nccl::kAvg ? call_.scale.value : 1;
    if (call_.op == nccl::kAvg) scale = 1.0 / comm_.size;
    with_type(call_.dtype, [&](auto value) {
      using T = decltype(value);
      const bool divides_later = std::is_integral_v<T> && call_.op == nccl::kAvg;
      if (!reduces || call_.op < nccl::kAvg || divides_later) {
        std::memcpy(to, from, now() * element_);
        return;
      }
      if (call_.scale.device_scalar != nullptr) {
        scale = static_cast<double>(load<T>(call_.scale.device_scalar, 0));
      }
      scale_as<T>(from, to, now(), scale);
    });
  }

  bool take() {
    const uint64_t number = comm_.num_chunks;
    for (int rank = 0; rank < comm_.size; ++rank) {
      if (board(rank).posted.load(kAcquire) < number) return false;
    }
    std::vector<const char*> slots;
    for (int rank = 0; rank < comm_.size; ++rank) {
      const Signature& theirs = board(rank).signatures[number % 2];
      if (!(theirs == signature_)) {
        record_fault(concat("ranks disagree: ", signature_.text, "; ", theirs.text));
        done_ = call_.count;
        return true;
      }
      slots.push_back(board(rank).data[number % 2]);
    }
    compute(slots);
    board(comm_.rank).taken.store(number, kRelease);
    done_ += now();
    is_posted_ = false;
    return true;
  }

  void compute(const std::vector<const char*>& slots) {
    if (call_.kind == CallKind::kAllGather) {
      for (int rank = 0; rank < comm_.size; ++rank) {
        std::memcpy(output(rank * call_.count + done_), slots[rank], now() * element_);
      }
    } else if (call_.kind == CallKind::kBroadcast) {
      std::memcpy(output(done_), slots[call_.root], now() * element_);
    } else {
      std::vector<const char*> inputs = slots;
      const size_t offset = call_.kind == CallKind::kReduceScatter ? comm_.rank * now() : 0;
      for (const char*& slot : inputs) slot += offset * element_;
      reduce(inputs);
    }
  }

  void reduce(const std::vector<const char*>& inputs) {
    with_type(call_.dtype, [&](auto value) {
      using T = decltype(value);
      reduce_as<T>(inputs, output(done_), now(), call_.op);
    });
  }

  CommState& comm_;
  NcclCall call_;
  size_t element_;
  size_t chunk_;
  Signature signature_;
  bool is_posted_ = false;
  size_t done_ = 0;  // elements
};

// A rendezvous: the sender is done when the receiver has everything.
class Message {
 public:
  Message(CommState& comm, const NcclCall& call)
      : comm_(comm), call_(call), nbytes_(call.count * nbytes_of(call.dtype)) {
    signature_ = signature_of(comm, call);
  }

  bool advance() { return call_.kind == CallKind::kSend ? send() : receive(); }

 private:
  size_t now() const { return std::min(kPacketNbytes, nbytes_ - done_); }

  bool send() {
    Mailbox& box = comm_.segment->mailboxes[comm_.rank][call_.root];
    uint64_t& number = comm_.num_sent[call_.root];
    while (box.taken.load(kAcquire) == number) {
      if (done_ == nbytes_) return true;
      box.signature = signature_;
      std::memcpy(box.data, static_cast<const char*>(call_.from) + done_, now());
      done_ += now();
      box.posted.store(++number, kRelease);
    }
    return false;
  }

  bool receive() {
    Mailbox& box = comm_.segment->mailboxes[call_.root][comm_.rank];
    uint64_t& number = comm_.num_received[call_.root];
    while (done_ < nbytes_) {
      if (box.posted.load(kAcquire) == number) return false;
      if (box.signature.count != call_.count || box.signature.dtype != call_.dtype) {
        record_fault(concat("ranks disagree: ", signature_.text, "; ", box.signature.text));
        return true;
      }
      std::memcpy(static_cast<char*>(call_.to) + done_, box.data, now());
      done_ += now();
      box.taken.store(++number, kRelease);
    }
    return true;
  }

  CommState& comm_;
  NcclCall call_;
  size_t nbytes_;
  Signature signature_;
  size_t done_ = 0;
};

template <class Progress>
Step step_of(const std::shared_ptr<CommState>& comm, const NcclCall& call) {
  return [comm, progress = Progress(*comm, call)]() mutable { return progress.advance(); };
}

}  // namespace

size_t nbytes_of(nccl::DataType dtype) {
  constexpr size_t kNbytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
  return kNbytes[dtype];
}

const char* name_of(nccl::DataType dtype) {
  constexpr const char* kNames[] = {"int8",   "uint8",   "int32",   "uint32",  "int64",
                                    "uint64", "float16", "float32", "float64", "bfloat16"};
  return dtype >= 0 && dtype <= nccl::kBfloat16 ? kNames[dtype] : nullptr;
}

double scalar_value(const void* scalar, nccl::DataType dtype) {
  double result = 0;
  with_type(dtype,
            [&](auto value) { result = static_cast<double>(load<decltype(value)>(scalar, 0)); });
  return result;
}

Step make_step(const std::shared_ptr<CommState>& comm, const NcclCall& call) {
  const bool is_message = call.kind == CallKind::kSend || call.kind == CallKind::kRecv;
  return is_message ? step_of<Message>(comm, call) : step_of<Collective>(comm, call);
}

}  // namespace pydist::emulation
