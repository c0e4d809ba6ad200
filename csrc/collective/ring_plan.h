// Which part of a buffer each rank sends, receives and adds in every step of a ring.
//
// The buffer is cut into one slice per rank, and every slice into as many segments as are to be in
// flight. In step s rank r sends slice r - s to rank r + 1, and receives slice r - s - 1 from rank
// r - 1 (all modulo the number of ranks, here 4):
//
//   step            0    1    2 |  3    4    5
//   rank 0 sends    0    3    2 |  1    0    3
//   rank 1 sends    1    0    3 |  2    1    0
//   rank 2 sends    2    1    0 |  3    2    1
//   rank 3 sends    3    2    1 |  0    3    2
//                reduce-scatter | all-gather
//
// In a step of the reduce-scatter a rank adds its own elements to what it has received, and sends
// the sum on in the next. So slice c is added in the order of ranks c, c + 1, ..., c - 1, the last
// of which has the whole sum; the all-gather carries it round once more.
#pragma once

#include <algorithm>
#include <cstdint>

namespace pydist {

// Elements [begin, begin + count) of the buffer; `index` counts the segments of the whole buffer.
struct RingSegment {
  int64_t begin;
  int64_t count;
  int index;
};

class RingPlan {
 public:
  // All segments begin at multiples of `alignment` and all but the last have the same length; those
  // behind the end of the buffer are empty.
  RingPlan(int64_t count, int size, int rank, int segments_in_flight, int64_t alignment)
      : count_(count), size_(size), rank_(rank), segments_in_flight_(segments_in_flight) {
    const int64_t num_segments = int64_t{size} * segments_in_flight;
    const int64_t elements = (count + num_segments - 1) / num_segments;
    segment_elements_ = (elements + alignment - 1) / alignment * alignment;
  }

  int size() const { return size_; }
  int segments_in_flight() const { return segments_in_flight_; }
  int num_segments() const { return size_ * segments_in_flight_; }
  int64_t segment_elements() const { return segment_elements_; }

  int num_steps() const { return 2 * (size_ - 1); }
  // Whether what is received is added to, and whether that makes the sum complete; else what is
  // received is a complete sum.
  bool adds(int step) const { return step < size_ - 1; }
  bool completes(int step) const { return step == size_ - 2; }

  // `k` counts the segments in flight.
  RingSegment sent(int step, int k) const { return segment_of(rank_ - step + size_, k); }
  RingSegment received(int step, int k) const { return segment_of(rank_ - step - 1 + size_, k); }

  RingSegment segment(int index) const {
    const int64_t begin = std::min(index * segment_elements_, count_);
    return {begin, std::min(segment_elements_, count_ - begin), index};
  }

 private:
  RingSegment segment_of(int slice, int k) const {
    return segment((slice + size_) % size_ * segments_in_flight_ + k);
  }

  int64_t count_;
  int size_;
  int rank_;
  int segments_in_flight_;
  int64_t segment_elements_;
};

}  // namespace pydist
