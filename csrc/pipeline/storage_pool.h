// Memory for received tensors, used again once nobody sees it any more.
#pragma once

#include <c10/core/Storage.h>

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace pydist {

class StoragePool {
 public:
  // Memory of torch's own allocator, not initialised, that nobody else sees.
  c10::Storage take(size_t nbytes);
  // Gives up memory that the last steps had no use for.
  void end_step();
  // What the pool knows of, in use or not.
  size_t nbytes() const { return nbytes_; }

 private:
  // Whoever takes a storage's memory away, or shares it behind the storage's back, changes one of
  // the three pointers.
  struct Entry {
    explicit Entry(size_t nbytes);
    bool is_free() const;
    bool is_intact() const;

    c10::Storage storage;
    const void* data;
    const void* context;
    c10::DeleterFnPtr deleter;
    uint64_t last_step = 0;
  };

  std::unordered_map<size_t, std::vector<Entry>> entries_;  // by size
  uint64_t step_ = 0;
  size_t nbytes_ = 0;
};

}  // namespace pydist
