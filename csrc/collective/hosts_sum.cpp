#include "collective/hosts_sum.h"

#include <algorithm>
#include <cstring>

#include "collective/convert.h"
#include "collective/float_control.h"
#include "collective/reduce.h"

namespace pydist {

namespace {

// What fits into a core's own cache with its inputs.
constexpr int64_t kBlockElements = 4096;

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBFloat16; }

// Of which a mean's parts are weighted and added.
DType sum_type(DType wire) { return is_half(wire) ? DType::kFloat32 : wire; }

// to = weight * from; apart from the additions, so that no compiler makes one rounding of both.
template <class Real>
void scale(const void* from, void* to, int64_t count, double weight) {
  const auto factor = static_cast<Real>(weight);
  const auto* source = static_cast<const Real*>(from);
  auto* target = static_cast<Real*>(to);
  for (int64_t i = 0; i < count; ++i) target[i] = factor * source[i];
}

void scale(DType dtype, const void* from, void* to, int64_t count, double weight) {
  const DefaultFloatControl control;
  const int64_t reals = is_complex(dtype) ? 2 * count : count;
  if (dtype == DType::kFloat64 || dtype == DType::kComplex128) {
    scale<double>(from, to, reals, weight);
  } else {
    scale<float>(from, to, reals, weight);
  }
}

DType wire_type(const Collective& collective) {
  const DType dtype = collective.output.dtype;
  return dtype == DType::kFloat32 ? collective.wire.value_or(dtype) : dtype;
}

}  // namespace

HostsSum::HostsSum(const HostLayout& layout, const Collective& collective, Isa isa)
    : dtype_(collective.output.dtype),
      wire_(wire_type(collective)),
      op_(collective.op),
      isa_(isa),
      inputs_(layout.num_hosts()) {
  if (op_ != ReduceOp::kMean) return;
  const int divisor = collective.divisor > 0 ? collective.divisor : layout.num_ranks();
  const int each = layout.num_lanes();
  if (layout.is_even() && divisor % each == 0) {
    divisor_ = divisor / each;
    return;
  }
  for (int h = 0; h < layout.num_hosts(); ++h) {
    weights_.push_back(static_cast<double>(layout.num_ranks_of(h)) / divisor);
  }
  scaled_.resize(static_cast<size_t>(layout.num_hosts() + 1) * kBlockElements *
                 dtype_nbytes(sum_type(wire_)));
}

void HostsSum::to_wire(const void* from, void* to, int64_t num_elements) const {
  if (wire_ != dtype_) return convert(dtype_, from, wire_, to, num_elements, isa_);
  std::memcpy(to, from, wire_nbytes(num_elements));
}

void HostsSum::from_wire(const void* from, void* to, int64_t num_elements) const {
  if (wire_ != dtype_) return convert(wire_, from, dtype_, to, num_elements, isa_);
  std::memcpy(to, from, wire_nbytes(num_elements));
}

void HostsSum::add(const uint8_t* contributions, size_t stride_nbytes, uint8_t* to,
                   int64_t num_elements) {
  const auto element_nbytes = static_cast<int64_t>(dtype_nbytes(wire_));
  for (int64_t at = 0; at < num_elements; at += kBlockElements) {
    const int64_t count = std::min(kBlockElements, num_elements - at);
    for (size_t h = 0; h < inputs_.size(); ++h) {
      inputs_[h] = contributions + h * stride_nbytes + at * element_nbytes;
    }
    uint8_t* output = to + at * element_nbytes;
    if (!weights_.empty()) {
      add_weighted(output, count);
      continue;
    }
    void* outputs[] = {output};
    reduce(wire_, op_,
           {inputs_.data(), static_cast<int>(inputs_.size()), outputs, 1, count, divisor_}, isa_);
  }
}

// Of one block, whose contributions are inputs_.
void HostsSum::add_weighted(uint8_t* to, int64_t num_elements) {
  const DType type = sum_type(wire_);
  const size_t block_nbytes = kBlockElements * dtype_nbytes(type);
  uint8_t* sum = scaled_.data() + inputs_.size() * block_nbytes;
  for (size_t h = 0; h < inputs_.size(); ++h) {
    uint8_t* mine = scaled_.data() + h * block_nbytes;
    const void* source = inputs_[h];
    if (type != wire_) {
      convert(wire_, source, type, mine, num_elements, isa_);
      source = mine;
    }
    scale(type, source, mine, num_elements, weights_[h]);
    inputs_[h] = mine;
  }
  void* outputs[] = {type == wire_ ? to : sum};
  reduce(type, ReduceOp::kSum,
         {inputs_.data(), static_cast<int>(inputs_.size()), outputs, 1, num_elements}, isa_);
  if (type != wire_) convert(type, sum, wire_, to, num_elements, isa_);
}

void HostsSum::reduce_ranks(const std::vector<const void*>& inputs, void* to,
                            int64_t num_elements) const {
  void* outputs[] = {to};
  reduce(dtype_, op_, {inputs.data(), static_cast<int>(inputs.size()), outputs, 1, num_elements},
         isa_);
}

}  // namespace pydist
