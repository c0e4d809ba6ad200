// What two ranks share for the messages of one direction: a ring, what its reader has refused, and
// what its writer has cut short.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"
#include "collective/buffer.h"
#include "collective/message_ring.h"
#include "collective/payload_layout.h"
#include "transport/board.h"

namespace pydist {

// Before every message in the ring.
struct MessageHeader {
  int64_t tag = 0;
  int64_t num_elements = 0;
  uint64_t dtype = 0;

  static MessageHeader of(const Buffer& buffer, int64_t tag) {
    return {tag, buffer.num_elements, static_cast<uint64_t>(buffer.dtype)};
  }
  size_t nbytes() const {
    return static_cast<size_t>(num_elements) * dtype_nbytes(static_cast<DType>(dtype));
  }
  bool fits(const Buffer& buffer) const {
    return num_elements == buffer.num_elements && dtype == static_cast<uint64_t>(buffer.dtype);
  }
  // "12 float32 with tag 3"
  std::string describe() const {
    return concat(num_elements, " ", dtype_name(static_cast<DType>(dtype)), " with tag ", tag);
  }
};

// The receiver's last refusal. Writer: the receiver. The words are atomic as the next refusal may
// overwrite them while the sender, who is then told of a mixture of the two, reads them.
struct alignas(kCacheLineNbytes) Refusal {
  std::atomic<uint64_t> count;  // the release that publishes the rest
  std::atomic<int64_t> tag;
  std::atomic<int64_t> expected_elements, found_elements;
  std::atomic<uint64_t> expected_dtype, found_dtype;
  std::atomic<uint64_t> cut_seen;  // the last Cut::message that was read to its end

  void publish(const MessageHeader& expected, const MessageHeader& found) {
    tag.store(found.tag, std::memory_order_relaxed);
    expected_elements.store(expected.num_elements, std::memory_order_relaxed);
    expected_dtype.store(expected.dtype, std::memory_order_relaxed);
    found_elements.store(found.num_elements, std::memory_order_relaxed);
    found_dtype.store(found.dtype, std::memory_order_relaxed);
    count.fetch_add(1, std::memory_order_release);
  }
  MessageHeader expected() const { return header(expected_elements, expected_dtype); }
  MessageHeader found() const { return header(found_elements, found_dtype); }

 private:
  MessageHeader header(const std::atomic<int64_t>& elements,
                       const std::atomic<uint64_t>& dtype) const {
    return {tag.load(std::memory_order_relaxed), elements.load(std::memory_order_relaxed),
            dtype.load(std::memory_order_relaxed)};
  }
};

// The last message that its sender cut short because one was refused, and where its bytes end.
// Writer: the sender, who begins no other message before the receiver has seen it.
struct alignas(kCacheLineNbytes) Cut {
  std::atomic<uint64_t> message;  // counted from 1; the release that publishes `end`
  std::atomic<uint64_t> end;
};

struct MessageChannel {
  RingControl ring;
  Refusal refusal;
  Cut cut;

  static MessageChannel* of(const Board& board, const PayloadLayout& layout, int from, int to) {
    return reinterpret_cast<MessageChannel*>(board.payload() + layout.ring(from, to));
  }
  uint8_t* data() { return reinterpret_cast<uint8_t*>(this + 1); }
};
static_assert(sizeof(MessageChannel) == PayloadLayout::kRingControlNbytes);

}  // namespace pydist
