// This process's arena: memory that its peers can reach, in one sealed memfd.
//
// Address space is reserved once; memory is had from the kernel in extents as blocks reach further,
// so that lack of it is an error here and never SIGBUS. The first page is the control page that
// peers read: token and life mutex.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "base/mapping.h"
#include "transport/block_allocator.h"

namespace pydist {

using Token = std::array<uint8_t, 16>;

// Random, from the kernel.
Token make_token();

// Anonymous shared memory of a fixed, sealed size; it takes no memory until charged. Raises
// ResourceError.
Fd make_memfd(const char* name, size_t nbytes);

// Takes the pages from the system now, so that touching them cannot fail. Raises ResourceError with
// the remedy.
void charge_memory(const Fd& fd, size_t begin, size_t end);

// The first page of every arena.
struct ArenaControl {
  Token token;
  int32_t pid;
  // Robust and process-shared, held for life by the endpoint's thread: the kernel marks it when
  // that thread dies.
  pthread_mutex_t life;
};

class Arena {
 public:
  // The process's arena, made at first use and never destroyed (tensors may outlive everything).
  // Raises ResourceError with the remedy where it cannot be had.
  static Arena& instance();
  // Null where instance() was never called, or in a forked child.
  static Arena* if_exists();

  uint8_t* base() const { return base_; }
  size_t capacity() const { return capacity_; }
  int fd() const { return fd_.get(); }
  const Token& token() const { return control()->token; }
  ArenaControl* control() const { return reinterpret_cast<ArenaControl*>(base_); }

  bool contains(const void* pointer) const {
    const auto* byte = static_cast<const uint8_t*>(pointer);
    return byte >= base_ && byte < base_ + capacity_;
  }
  uint64_t offset_of(const void* pointer) const {
    return static_cast<const uint8_t*>(pointer) - base_;
  }

  // Memory aligned to 64 bytes, not initialised. try_allocate returns null where none can be had;
  // allocate raises ResourceError.
  void* try_allocate(size_t nbytes) noexcept;
  void* allocate(size_t nbytes);
  // Any thread. A pinned block is given back when its last pin goes.
  void deallocate(void* pointer) noexcept;
  // Keeps the block that starts at pointer from being reused, whatever happens to its tensor.
  // Counted.
  void pin(void* pointer);
  void unpin(void* pointer) noexcept;

  // True if a block starts at pointer.
  bool is_block(const void* pointer) const;

  size_t used_nbytes() const;       // in blocks that are handed out or pinned
  size_t committed_nbytes() const;  // had from the kernel

 private:
  Arena();
  bool commit(size_t end_offset) noexcept;
  static void before_fork();
  static void after_fork_in_parent();
  static void after_fork_in_child();

  mutable std::mutex mutex_;
  Fd fd_;
  uint8_t* base_ = nullptr;
  size_t capacity_ = 0;
  size_t committed_ = 0;
  BlockAllocator blocks_;
};

}  // namespace pydist
