// Casts between a buffer and its parts as they travel.
#include "collective/wire_parts.h"

#include <algorithm>

namespace pydist {

namespace {

void cast(Element from, const void* source, Element to, void* target, int64_t num_elements,
          Stream stream) {
  ReduceSegmentsArguments arguments;
  arguments.inputs = source;
  arguments.output = target;
  arguments.num_elements = num_elements;
  reduce_segments(from, to, arguments, stream);
}

}  // namespace

WireParts::WireParts(const MeanTask& task, int num_parts, int64_t part_elements)
    : task_(task),
      num_parts_(num_parts),
      part_elements_(part_elements),
      part_nbytes_(element_nbytes(task.wire, part_elements)) {}

int64_t WireParts::begin(int part) const { return std::min(part * part_elements_, task_.count); }

// Parts lie one behind the other as the elements do, but that each of float8 has its own scales.
template <class Cast>
void WireParts::for_each_run(Cast&& cast_run) const {
  if (!are_apart()) return;
  const bool one_by_one = task_.wire == Element::kFloat8;
  for (int part = 0; part < (one_by_one ? num_parts_ : 1); ++part) {
    cast_run(begin(part), offset(part), one_by_one ? num_elements(part) : task_.count);
  }
}

void WireParts::encode(uint8_t* apart, Stream stream) const {
  for_each_run([&](int64_t begin, size_t offset, int64_t num_elements) {
    cast(task_.own, own(begin), task_.wire, apart + offset, num_elements, stream);
  });
}

void WireParts::decode(const uint8_t* apart, Stream stream) const {
  for_each_run([&](int64_t begin, size_t offset, int64_t num_elements) {
    cast(task_.wire, apart + offset, task_.own, own(begin), num_elements, stream);
  });
}

void WireParts::decode_part(const uint8_t* apart, int part, Stream stream) const {
  cast(task_.wire, apart + offset(part), task_.own, own(begin(part)), num_elements(part), stream);
}

}  // namespace pydist
