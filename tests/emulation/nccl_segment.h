// The memory that the ranks of one communicator share: nameless, so that nothing is left behind.
// Rank 0 of the unique id makes it; the others open it through /proc.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace pydist::emulation {

constexpr int kMaxRanks = 16;
constexpr size_t kChunkNbytes = 1 << 18;   // of a collective
constexpr size_t kPacketNbytes = 1 << 16;  // of a message between two ranks

// A call as its peers must have made it.
struct Signature {
  int kind = 0;
  int dtype = 0;
  int op = 0;
  int root = 0;
  uint64_t count = 0;
  char text[232] = {};  // for messages

  bool operator==(const Signature& other) const {
    return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root &&
           count == other.count;
  }
};

// What a rank shows all others, chunk by chunk; a slot is written again when all have taken it.
struct Board {
  std::atomic<uint64_t> posted;
  std::atomic<uint64_t> taken;
  Signature signatures[2];
  char data[2][kChunkNbytes];
};

struct Mailbox {
  std::atomic<uint64_t> posted;
  std::atomic<uint64_t> taken;
  Signature signature;
  char data[kPacketNbytes];
};

constexpr int kSenderCame = 1;
constexpr int kReceiverCame = 2;

struct Segment {
  std::atomic<int> size;  // set by the first to come
  std::atomic<int> num_attached;
  std::atomic<int> num_finalizing;
  std::atomic<int> pids[kMaxRanks];
  // Registrations of windows so far, and the last one's size.
  std::atomic<uint64_t> num_windows[kMaxRanks];
  std::atomic<uint64_t> window_nbytes[kMaxRanks];
  Board boards[kMaxRanks];
  Mailbox mailboxes[kMaxRanks][kMaxRanks];  // by source and destination
  // By source and destination: who has begun to connect, of kSenderCame and kReceiverCame.
  std::atomic<int> came[kMaxRanks][kMaxRanks];
};

struct SegmentName {
  int32_t pid;
  int32_t fd;
  uint64_t number;
};

// A new one, of this process; kept until forget_segment().
SegmentName make_segment();
// Null where it is gone.
std::shared_ptr<Segment> open_segment(const SegmentName& name);
void forget_segment(const SegmentName& name);

}  // namespace pydist::emulation
