// A stream of bytes from one writer to one reader through a ring in memory that both see. Pure: any
// memory will do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "transport/board.h"

namespace pydist {

// Positions grow for ever; a byte's place is its position modulo the ring's size.
struct RingControl {
  Counter written;  // by the writer
  Counter read;     // by the reader
};

class RingWriter {
 public:
  RingWriter() = default;
  RingWriter(RingControl* control, uint8_t* data, size_t nbytes)
      : control_(control), data_(data), nbytes_(nbytes) {}

  size_t free_nbytes() const {
    // Acquire: pairs with the reader's release, so that its copies are over before we overwrite.
    return nbytes_ - (written_ - control_->read.value.load(std::memory_order_acquire));
  }

  uint64_t position() const { return written_; }

  // Writes as much as there is room for; returns how much.
  size_t write(const void* from, size_t nbytes) {
    nbytes = std::min(nbytes, free_nbytes());
    if (nbytes == 0) return 0;
    const size_t begin = written_ % nbytes_;
    const size_t first = std::min(nbytes, nbytes_ - begin);
    std::memcpy(data_ + begin, from, first);
    std::memcpy(data_, static_cast<const uint8_t*>(from) + first, nbytes - first);
    written_ += nbytes;
    control_->written.value.store(written_, std::memory_order_release);
    return nbytes;
  }

 private:
  RingControl* control_ = nullptr;
  uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
  uint64_t written_ = 0;
};

class RingReader {
 public:
  RingReader() = default;
  RingReader(RingControl* control, const uint8_t* data, size_t nbytes)
      : control_(control), data_(data), nbytes_(nbytes) {}

  size_t available_nbytes() const {
    // Acquire: pairs with the writer's release, so that the bytes are there.
    return control_->written.value.load(std::memory_order_acquire) - read_;
  }

  uint64_t position() const { return read_; }

  // Reads as much as is there, at most nbytes; returns how much.
  size_t read(void* to, size_t nbytes) {
    nbytes = std::min(nbytes, available_nbytes());
    if (nbytes == 0) return 0;
    const size_t begin = read_ % nbytes_;
    const size_t first = std::min(nbytes, nbytes_ - begin);
    std::memcpy(to, data_ + begin, first);
    std::memcpy(static_cast<uint8_t*>(to) + first, data_, nbytes - first);
    return advance(nbytes);
  }

  // The same without keeping it.
  size_t skip(size_t nbytes) { return advance(std::min(nbytes, available_nbytes())); }

 private:
  size_t advance(size_t nbytes) {
    read_ += nbytes;
    control_->read.value.store(read_, std::memory_order_release);
    return nbytes;
  }

  RingControl* control_ = nullptr;
  const uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
  uint64_t read_ = 0;
};

}  // namespace pydist
