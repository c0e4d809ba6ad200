// Which parameters' gradients travel together. Pure.
//
// A unit is what is published and reduced at a time. A large gradient is a unit of its own, so that
// it can be reduced where autograd wrote it; small ones share a unit, a bucket, into which they are
// packed one after the other.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/dtype.h"

namespace pydist {

// What a layout needs to know of one parameter; complex ones are given as twice as many real
// elements.
struct ParameterSpec {
  int64_t num_elements = 0;
  DType dtype = DType::kFloat32;  // in which the gradient travels
  int group = 0;                  // parameters of different groups never share a bucket
  bool flat = false;              // in one bucket of its group and dtype, whatever the sizes

  size_t nbytes() const { return static_cast<size_t>(num_elements) * dtype_nbytes(dtype); }
};

struct Member {
  int parameter = 0;
  int64_t begin = 0;  // first element within the unit
};

struct Unit {
  DType dtype = DType::kFloat32;
  int64_t num_elements = 0;
  bool alone = false;  // one large gradient, reduced in place where possible
  std::vector<Member> members;

  size_t nbytes() const { return static_cast<size_t>(num_elements) * dtype_nbytes(dtype); }
};

struct LayoutOptions {
  // Gradients of at least this size are units of their own; SIZE_MAX: none.
  size_t alone_nbytes = size_t{32} << 10;
  // A bucket is closed once it has reached its size: of the first bucket of a dtype and group, the
  // second and so on; the last size is that of all further ones.
  std::vector<size_t> caps_nbytes = {size_t{25} << 20};
};

// Fills units in the given order of parameters. Every parameter with elements is in exactly one
// unit; those without are in none. A parameter is never split, so a bucket may exceed its cap by
// one parameter.
std::vector<Unit> make_layout(const std::vector<ParameterSpec>& parameters,
                              const std::vector<int>& order, const LayoutOptions& options);

}  // namespace pydist
