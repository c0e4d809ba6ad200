// The staged way: data travels through slots of the board, in steps.
//
// Each rank has two slots, and two result slices. In step t a rank fills its slot t % 2, then
// combines what it finds for itself in everybody's slots, then (all_reduce only) collects the
// results of the others. The phases of three steps overlap:
//
//   iteration      0        1        2        3       ...
//   collect                          0        1                 after everybody has combined that
//   step fill           0        1        2        3 combine                 0        1        2
//   after everybody has filled that step
//
// Slot t % 2 is filled again in iteration t + 2, after everybody has combined t. A result slice is
// written again when step t + 2 is combined, after everybody has filled t + 2, which each does
// after collecting t. The next operation's agreement separates it from this one, so a step's slots
// are free at its start.
#include <algorithm>
#include <cstring>

#include "collective/shm_communicator.h"
#include "collective/stream_copy.h"

namespace pydist {

namespace {

int64_t divide_up(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }

void copy(void* to, const void* from, size_t nbytes) {
  if (to != from && nbytes > 0) std::memcpy(to, from, nbytes);
}

// From a reduction, still in the cache when it is copied on.
constexpr int64_t kBlockNbytes = 16 << 10;

}  // namespace

struct ShmCommunicator::StagedPlan {
  const Call& call;
  int64_t num_steps;
  int only_filler = Board::kAnybody;
  bool collects = false;
};

// Several buffers as one run of bytes.
class ShmCommunicator::ByteList {
 public:
  explicit ByteList(const Collective& collective)
      : first_(collective.operation == Operation::kBroadcast ? &collective.output
                                                             : collective.buffers.data()),
        count_(collective.operation == Operation::kBroadcast ? 1 : collective.buffers.size()) {}

  void read(size_t begin, size_t nbytes, uint8_t* to) const {
    visit(begin, nbytes, [&](uint8_t* piece, size_t piece_nbytes) {
      stream_copy(to, piece, piece_nbytes);
      to += piece_nbytes;
    });
  }
  void write(size_t begin, size_t nbytes, const uint8_t* from) const {
    visit(begin, nbytes, [&](uint8_t* piece, size_t piece_nbytes) {
      std::memcpy(piece, from, piece_nbytes);
      from += piece_nbytes;
    });
  }

 private:
  template <class Visit>
  void visit(size_t begin, size_t nbytes, Visit&& visit_piece) const {
    for (size_t k = 0; k < count_ && nbytes > 0; ++k) {
      const Buffer& buffer = first_[k];
      if (begin >= buffer.nbytes()) {
        begin -= buffer.nbytes();
        continue;
      }
      const size_t piece_nbytes = std::min(nbytes, buffer.nbytes() - begin);
      visit_piece(buffer.bytes() + begin, piece_nbytes);
      nbytes -= piece_nbytes;
      begin = 0;
    }
  }

  const Buffer* first_;
  size_t count_;
};

template <class Fill, class Combine, class Collect>
void ShmCommunicator::run_staged(const StagedPlan& plan, Fill&& fill, Combine&& combine,
                                 Collect&& collect) {
  const uint64_t before = staged_steps_;
  staged_steps_ += static_cast<uint64_t>(plan.num_steps);
  RankFlags& mine = flags(rank_);
  const bool fills = plan.only_filler == Board::kAnybody || plan.only_filler == rank_;
  if (!fills) publish(mine.filled.value, staged_steps_);
  for (int64_t t = 0; t < plan.num_steps + 2; ++t) {
    const bool fills_now = fills && t < plan.num_steps;
    if (t >= 2 && (plan.collects || fills_now)) {
      await(&RankFlags::combined, before + static_cast<uint64_t>(t - 1), plan.call);
      collect(t - 2);
    }
    if (fills_now) {
      fill(t);
      publish(mine.filled.value, before + static_cast<uint64_t>(t + 1));
    }
    if (t >= 1 && t <= plan.num_steps) {
      await(&RankFlags::filled, before + static_cast<uint64_t>(t), plan.call, plan.only_filler);
      combine(t - 1);
      publish(mine.combined.value, before + static_cast<uint64_t>(t));
    }
  }
}

void ShmCommunicator::transfer_staged(const Collective& collective, const Call& call) {
  switch (call.operation) {
    case Operation::kAllReduce:
    case Operation::kReduce:
      return reduce_staged(collective, call);
    case Operation::kReduceScatter:
      return reduce_scatter_staged(collective, call);
    case Operation::kAllGather:
    case Operation::kGather:
      return gather_staged(collective, call);
    case Operation::kScatter:
      return scatter_staged(collective, call);
    case Operation::kBroadcast:
    case Operation::kBroadcastMany:
      return broadcast_staged(collective, call);
    case Operation::kAllToAll:
      return all_to_all_staged(collective, call);
    default:
      return;
  }
}

// A step takes a piece of the tensor, of one slice per rank: slots carry slices to their owner, who
// reduces them into its own output and its result slice; from there the others collect it. Where
// only the root gets it, the others leave their tensors alone.
void ShmCommunicator::reduce_staged(const Collective& collective, const Call& call) {
  const Buffer& buffer = collective.output;
  const bool gets_it = call.operation == Operation::kAllReduce || rank_ == call.root;
  const auto element_nbytes = static_cast<int64_t>(dtype_nbytes(buffer.dtype));
  const auto slice_nbytes = static_cast<int64_t>(layout_.slice_nbytes());
  const int64_t line_elements = static_cast<int64_t>(kCacheLineNbytes) / element_nbytes;
  const int64_t piece = slice_nbytes / element_nbytes * size_;
  struct Slice {
    uint8_t* data;
    int64_t num_elements;
  };
  const auto slice_of = [&](int64_t t, int r) {
    const int64_t piece_elements = std::min(piece, buffer.num_elements - t * piece);
    const int64_t share =
        divide_up(divide_up(piece_elements, size_), line_elements) * line_elements;
    const int64_t begin = std::min(r * share, piece_elements);
    const int64_t end = std::min(begin + share, piece_elements);
    return Slice{buffer.bytes() + (t * piece + begin) * element_nbytes, end - begin};
  };
  run_staged(
      {call, divide_up(buffer.num_elements, piece), Board::kAnybody, true},
      [&](int64_t t) {
        for (int r = 0; r < size_; ++r) {
          const Slice slice = slice_of(t, r);
          if (r != rank_) {
            stream_copy(slot(t, rank_) + r * slice_nbytes, slice.data,
                        slice.num_elements * element_nbytes);
          }
        }
      },
      [&](int64_t t) {
        const Slice mine = slice_of(t, rank_);
        const int64_t end = mine.num_elements * element_nbytes;
        for (int64_t at = 0; at < end; at += kBlockNbytes) {
          const int64_t nbytes = std::min(kBlockNbytes, end - at);
          for (int r = 0; r < size_; ++r) inputs_[r] = slot(t, r) + rank_ * slice_nbytes + at;
          inputs_[rank_] = mine.data + at;
          outputs_[0] = gets_it ? mine.data + at : result(t, rank_) + at;
          reduce(buffer.dtype, collective.op,
                 {inputs_.data(), size_, outputs_.data(), 1, nbytes / element_nbytes},
                 board_->isa());
          if (call.operation == Operation::kAllReduce) {
            stream_copy(result(t, rank_) + at, mine.data + at, nbytes);
          }
        }
      },
      [&](int64_t t) {
        for (int r = 0; r < size_ && gets_it; ++r) {
          const Slice slice = slice_of(t, r);
          if (r != rank_) copy(slice.data, result(t, r), slice.num_elements * element_nbytes);
        }
      });
}

void ShmCommunicator::reduce_scatter_staged(const Collective& collective, const Call& call) {
  const Buffer& output = collective.output;
  const auto element_nbytes = static_cast<int64_t>(dtype_nbytes(output.dtype));
  const auto slice_nbytes = static_cast<int64_t>(layout_.slice_nbytes());
  const int64_t slice = slice_nbytes / element_nbytes;
  const auto elements_of = [&](int64_t t) {
    return std::min(slice, output.num_elements - t * slice);
  };
  const auto input_of = [&](int64_t t, int r) {
    return collective.input.bytes() + (r * output.num_elements + t * slice) * element_nbytes;
  };
  run_staged(
      {call, divide_up(output.num_elements, slice)},
      [&](int64_t t) {
        for (int r = 0; r < size_; ++r) {
          if (r == rank_) continue;
          stream_copy(slot(t, rank_) + r * slice_nbytes, input_of(t, r),
                      elements_of(t) * element_nbytes);
        }
      },
      [&](int64_t t) {
        for (int r = 0; r < size_; ++r) inputs_[r] = slot(t, r) + rank_ * slice_nbytes;
        inputs_[rank_] = input_of(t, rank_);
        outputs_[0] = output.bytes() + t * slice * element_nbytes;
        reduce(output.dtype, collective.op,
               {inputs_.data(), size_, outputs_.data(), 1, elements_of(t)}, board_->isa());
      },
      [](int64_t) {});
}

void ShmCommunicator::gather_staged(const Collective& collective, const Call& call) {
  const size_t share_nbytes = collective.input.nbytes();
  const bool gets_it = call.operation == Operation::kAllGather || rank_ == call.root;
  const size_t slot_nbytes = layout_.slot_nbytes();
  const auto begin_of = [&](int64_t t) { return static_cast<size_t>(t) * slot_nbytes; };
  const auto nbytes_of = [&](int64_t t) {
    return std::min(slot_nbytes, share_nbytes - begin_of(t));
  };
  run_staged(
      {call, divide_up(share_nbytes, slot_nbytes)},
      [&](int64_t t) {
        stream_copy(slot(t, rank_), collective.input.bytes() + begin_of(t), nbytes_of(t));
      },
      [&](int64_t t) {
        for (int r = 0; r < size_ && gets_it; ++r) {
          const uint8_t* from = r == rank_ ? collective.input.bytes() + begin_of(t) : slot(t, r);
          copy(collective.output.bytes() + r * share_nbytes + begin_of(t), from, nbytes_of(t));
        }
      },
      [](int64_t) {});
}

void ShmCommunicator::scatter_staged(const Collective& collective, const Call& call) {
  const Buffer& output = collective.output;
  const size_t slice_nbytes = layout_.slice_nbytes();
  const size_t share_nbytes = output.nbytes();
  const auto begin_of = [&](int64_t t) { return static_cast<size_t>(t) * slice_nbytes; };
  const auto nbytes_of = [&](int64_t t) {
    return std::min(slice_nbytes, share_nbytes - begin_of(t));
  };
  const auto input_of = [&](int64_t t, int r) {
    return collective.input.bytes() + r * share_nbytes + begin_of(t);
  };
  run_staged(
      {call, divide_up(share_nbytes, slice_nbytes), call.root},
      [&](int64_t t) {
        for (int r = 0; r < size_; ++r) {
          if (r == rank_) continue;
          stream_copy(slot(t, rank_) + r * slice_nbytes, input_of(t, r), nbytes_of(t));
        }
      },
      [&](int64_t t) {
        const uint8_t* from =
            rank_ == call.root ? input_of(t, rank_) : slot(t, call.root) + rank_ * slice_nbytes;
        copy(output.bytes() + begin_of(t), from, nbytes_of(t));
      },
      [](int64_t) {});
}

void ShmCommunicator::broadcast_staged(const Collective& collective, const Call& call) {
  const ByteList bytes(collective);
  const bool many = call.operation == Operation::kBroadcastMany;
  const size_t total = many ? static_cast<size_t>(call.num_elements) : collective.output.nbytes();
  const size_t slot_nbytes = layout_.slot_nbytes();
  const auto begin_of = [&](int64_t t) { return static_cast<size_t>(t) * slot_nbytes; };
  const auto nbytes_of = [&](int64_t t) { return std::min(slot_nbytes, total - begin_of(t)); };
  run_staged(
      {call, divide_up(total, slot_nbytes), call.root},
      [&](int64_t t) { bytes.read(begin_of(t), nbytes_of(t), slot(t, rank_)); },
      [&](int64_t t) {
        if (rank_ != call.root) bytes.write(begin_of(t), nbytes_of(t), slot(t, call.root));
      },
      [](int64_t) {});
}

void ShmCommunicator::all_to_all_staged(const Collective& collective, const Call& call) {
  const auto element_nbytes = static_cast<int64_t>(dtype_nbytes(call.dtype));
  const auto slice_nbytes = static_cast<int64_t>(layout_.slice_nbytes());
  const int64_t slice = slice_nbytes / element_nbytes;
  int64_t longest = 0;
  for (int r = 0; r < size_; ++r) {
    longest = std::max(longest, *std::max_element(splits(r), splits(r) + size_));
  }
  // One rank's segment of a buffer, cut into slices: visit(r, where slice t begins, its bytes).
  const auto visit_slices = [&](int64_t t, const Buffer& buffer, const std::vector<int64_t>& sizes,
                                auto&& visit) {
    int64_t begin = 0;
    for (int r = 0; r < size_; begin += sizes[r++]) {
      const int64_t num_elements = std::min(slice, sizes[r] - t * slice);
      if (num_elements <= 0) continue;
      visit(r, buffer.bytes() + (begin + t * slice) * element_nbytes,
            num_elements * element_nbytes);
    }
  };
  run_staged(
      {call, divide_up(longest, slice)},
      [&](int64_t t) {
        visit_slices(t, collective.input, collective.input_splits,
                     [&](int r, const uint8_t* from, int64_t nbytes) {
                       stream_copy(slot(t, rank_) + r * slice_nbytes, from, nbytes);
                     });
      },
      [&](int64_t t) {
        visit_slices(t, collective.output, collective.output_splits,
                     [&](int r, uint8_t* to, int64_t nbytes) {
                       copy(to, slot(t, r) + rank_ * slice_nbytes, nbytes);
                     });
      },
      [](int64_t) {});
}

}  // namespace pydist
