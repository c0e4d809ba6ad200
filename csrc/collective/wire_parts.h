// A buffer in the type it travels in, cut into equal parts: where each lies, and the casts there
// and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/device_runtime.h"
#include "collective/device_kernels/reduce_segments.h"

namespace pydist {

// A mean that is to be left where its elements are.
struct MeanTask {
  uint8_t* data;
  int64_t count;
  Element own;
  Element wire;  // narrower than `own`, or the same
  double scale;
  const std::string& what;
};

// Where the wire's type is the elements' own, the buffer itself travels, and parts are places in
// it; else they lie apart, in memory of nbytes(), and encode() and decode() carry elements there
// and back. The last parts may be shorter, or empty.
class WireParts {
 public:
  // Whole blocks of float8; and then parts of every type begin at multiples of 16 bytes, if the
  // buffer does.
  static constexpr int64_t kAlignment = kFloat8Block;

  // `part_elements` is a multiple of kAlignment, or divides the count and lies within the buffer.
  WireParts(const MeanTask& task, int num_parts, int64_t part_elements);

  bool are_apart() const { return task_.own != task_.wire; }
  // Of memory apart; also what places for whole parts need.
  size_t nbytes() const { return num_parts_ * part_nbytes_; }
  size_t part_nbytes() const { return part_nbytes_; }
  // Where the parts lie: `apart`, or the buffer.
  uint8_t* travelling(uint8_t* apart) const { return are_apart() ? apart : task_.data; }

  int64_t num_elements(int part) const { return begin(part + 1) - begin(part); }
  size_t nbytes(int part) const { return element_nbytes(task_.wire, num_elements(part)); }
  // From the first part's begin.
  size_t offset(int part) const {
    return are_apart() ? part * part_nbytes_ : element_nbytes(task_.wire, begin(part));
  }

  // All parts; nothing where they are not apart.
  void encode(uint8_t* apart, Stream stream) const;
  void decode(const uint8_t* apart, Stream stream) const;
  void decode_part(const uint8_t* apart, int part, Stream stream) const;

 private:
  int64_t begin(int part) const;
  template <class Cast>
  void for_each_run(Cast&& cast) const;
  uint8_t* own(int64_t begin) const { return task_.data + element_nbytes(task_.own, begin); }

  const MeanTask& task_;
  int num_parts_;
  int64_t part_elements_;
  size_t part_nbytes_;
};

}  // namespace pydist
