// How gradients become units and units become gradients: the reducer's copies, and its proof that
// none is needed.
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "base/check.h"
#include "bucket/mean_graph.h"
#include "bucket/reducer.h"

// torch from 2.13 on has a test of its own for a tensor that one holder may take over; where it is
// missing, this one is found in its place (the ellipsis loses against any other declaration). A
// Python wrapper holds a reference only since then.
namespace pydist_before_2_13 {
inline bool is_tensor_stealable(const at::Tensor& tensor, ...) { return tensor.use_count() <= 1; }
}  // namespace pydist_before_2_13

namespace pydist {

namespace {

bool held_once(const at::Tensor& tensor) {
  using namespace torch::autograd::impl;
  using namespace pydist_before_2_13;
  return is_tensor_stealable(tensor, size_t{1});
}

// Elements in the parameter's own storage order, which is the same on all ranks.
bool same_layout(const at::Tensor& variable, const at::Tensor& gradient) {
  return gradient.strides() == variable.strides() && gradient.sizes() == variable.sizes() &&
         gradient.scalar_type() == variable.scalar_type() && !gradient.is_conj() &&
         !gradient.is_neg();
}

// A hook may have freed the storage under the tensor; reading or writing it would then crash.
void check_memory(const std::string& name, const at::Tensor& gradient) {
  const int64_t last = gradient.numel() == 0 ? 0 : [&] {
    int64_t offset = gradient.storage_offset();
    for (int64_t d = 0; d < gradient.dim(); ++d) {
      offset += (gradient.size(d) - 1) * gradient.stride(d);
    }
    return offset + 1;
  }();
  PYDIST_CHECK(gradient.storage().nbytes() >= static_cast<size_t>(last) * gradient.itemsize(),
               UsageError, "the memory of the gradient of parameter ", name,
               " was freed or shrunk during backward, before ranks had averaged it; do that after "
               "backward()");
}

}  // namespace

// Reducing in place overwrites the gradient's memory, so this process must hold that memory alone:
// another tensor on the same storage (a second parameter's gradient, an activation's gradient that
// still travels on, what a hook kept) would silently change. Autograd steals by looking at tensors,
// not at storages, so we count the storage's users: `gradient` is one; the incoming tensor it was
// detached from, which dies with this node, may be the second, and its base the third.
const char* Reducer::why_not_in_place(const Parameter& parameter, const at::Tensor& gradient,
                                      const std::vector<at::Tensor>& incoming) const {
  if (narrowed(parameter)) return "wire type";
  if (!round_->reaches(gradient.data_ptr())) return "not in the arena";
  if (gradient.requires_grad()) return "has a graph (create_graph)";
  if (!parameter.dense || !same_layout(parameter.variable, gradient)) return "other strides";
  const c10::Storage& storage = gradient.storage();
  if (gradient.storage_offset() != 0 || storage.nbytes() != parameter.nbytes) {
    return "shared storage";
  }
  size_t holders = 1;
  for (const at::Tensor& tensor : incoming) {
    if (!tensor.defined() || !tensor.has_storage() || !tensor.storage().is_alias_of(storage)) {
      continue;
    }
    // Held by the engine's list only; a Python wrapper that nobody else has is allowed.
    if (!held_once(tensor)) return "held by user code";
    ++holders;
    if (tensor.is_view()) {
      if (tensor._base().use_count() > 1) return "shared storage";  // the view's own handle
      ++holders;
    }
  }
  return storage.use_count() <= holders ? nullptr : "shared storage";
}

uint8_t* Reducer::member_memory(const Parameter& parameter) const {
  const size_t element_nbytes = dtype_nbytes(units_[parameter.unit].dtype);
  return static_cast<uint8_t*>(round_->unit_memory(parameter.unit)) +
         parameter.begin * element_nbytes;
}

PackItem Reducer::to_unit(const Parameter& parameter, const void* source) const {
  return {source, parameter.element_dtype, member_memory(parameter), units_[parameter.unit].dtype,
          num_elements(parameter)};
}

PackItem Reducer::from_unit(const Parameter& parameter, void* target) const {
  return {member_memory(parameter), units_[parameter.unit].dtype, target, parameter.element_dtype,
          num_elements(parameter)};
}

// Of the parameter's part of its unit.
c10::DimVector Reducer::view_strides(const Parameter& parameter) {
  const at::Tensor& variable = parameter.variable;
  if (parameter.dense) return c10::DimVector(variable.strides());
  return c10::contiguous_strides(variable.sizes());
}

// `memory` as a tensor of the parameter's shape and type with its elements in the unit's order; new
// memory where it is null.
at::Tensor Reducer::like_unit(const Parameter& parameter, void* memory) const {
  const at::Tensor& variable = parameter.variable;
  const auto options = variable.options().requires_grad(false);
  const auto strides = view_strides(parameter);
  if (memory == nullptr) return at::empty_strided(variable.sizes(), strides, options);
  // With the device given, nobody has to ask whose memory it is.
  return at::for_blob(memory, variable.sizes())
      .strides(strides)
      .options(options)
      .target_device(options.device())
      .make_tensor();
}

// The general way into the unit, for a gradient in whatever layout.
void Reducer::write_unit(const Parameter& parameter, const at::Tensor& gradient) const {
  if (!narrowed(parameter)) {
    like_unit(parameter, member_memory(parameter)).copy_(gradient);
    return;
  }
  const at::Tensor ordered = like_unit(parameter, nullptr).copy_(gradient);
  round_->copy(parameter.unit, CopyDirection::kToUnit, {to_unit(parameter, ordered.data_ptr())});
}

// The parameter's part of its unit: the memory itself, or a copy in the parameter's type.
at::Tensor Reducer::read_unit(const Parameter& parameter) const {
  if (!narrowed(parameter)) return like_unit(parameter, member_memory(parameter));
  at::Tensor values = like_unit(parameter, nullptr);
  round_->copy(parameter.unit, CopyDirection::kFromUnit, {from_unit(parameter, values.data_ptr())});
  return values;
}

// The unit's memory as a tensor that keeps it alive, also when the reducer is gone.
at::Tensor Reducer::bucket_of(int unit) {
  UnitState& state = states_[unit];
  if (!state.bucket.defined()) {
    const at::Tensor& sample = parameters_[units_[unit].members.front().parameter].variable;
    const int64_t elements = units_[unit].num_elements / (sample.is_complex() ? 2 : 1);
    auto held = round_->hold_memory(unit);
    const auto options = sample.options().requires_grad(false);
    state.bucket = at::for_blob(round_->unit_memory(unit), {elements})
                       .deleter([held](void*) {})
                       .options(options)
                       .target_device(options.device())
                       .make_tensor();
  }
  return state.bucket;
}

// A tensor on the bucket's storage that autograd does not regard as a view, so that users may
// detach_() it.
at::Tensor Reducer::view_of(const Parameter& parameter) {
  const at::Tensor bucket = bucket_of(parameter.unit);
  const at::Tensor& variable = parameter.variable;
  const int64_t offset = parameter.begin / (variable.is_complex() ? 2 : 1);
  at::Tensor view = at::empty({0}, bucket.options());
  view.set_(bucket.storage(), offset, variable.sizes(), view_strides(parameter));
  return view;
}

// A gradient that was ready must still be there.
void Reducer::check_present(const Parameter& parameter) const {
  const bool present = parameter.aside.defined() || parameter.variable.grad().defined();
  PYDIST_CHECK(present || !parameter.ready, UsageError, "the gradient of parameter ",
               parameter.name,
               " was set to None during backward, before ranks had averaged it; do that after "
               "backward()");
}

void Reducer::hand_over(Parameter& parameter, const at::Tensor& gradient, bool exclusive) {
  parameter.handed = gradient.data_ptr();
  parameter.version = exclusive ? static_cast<int64_t>(gradient._version()) : -1;
}

// What has been handed over must be as it was: what a hook did to it since would count on some
// ranks, or on none. Asked before ranks agree on the round's end, so that all of them learn of it.
void Reducer::check_handed() const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.handed == nullptr) continue;
    check_present(parameter);
    const at::Tensor& gradient = parameter.is_aside ? parameter.aside : parameter.variable.grad();
    PYDIST_CHECK(
        gradient.defined() && gradient.has_storage() && gradient.data_ptr() == parameter.handed,
        UsageError, "the gradient of parameter ", parameter.name,
        " was replaced, moved or resized during backward, while ranks were averaging it; "
        "do that after backward()");
    check_memory(parameter.name, gradient);
    PYDIST_CHECK(parameter.version < 0 || gradient._version() == parameter.version, UsageError,
                 "the gradient of parameter ", parameter.name,
                 " was modified during backward (by a hook?), while ranks were averaging it; do "
                 "that after backward()");
  }
}

// Writes every member's contribution: its current `.grad`, zeros where there is none; or, in the
// second round, what came again.
void Reducer::pack_unit(int unit, bool only_again) {
  const at::NoGradGuard no_grad;
  round_->open(unit);
  std::vector<PackItem> items;
  items.reserve(units_[unit].members.size());
  for (const Member& member : units_[unit].members) {
    Parameter& parameter = parameters_[member.parameter];
    const at::Tensor& gradient = parameter.variable.grad();
    uint8_t* target = member_memory(parameter);
    const bool gives =
        gradient.defined() && !shadows_ && (!only_again || record_.again.test(member.parameter));
    check_present(parameter);
    if (gives) check_memory(parameter.name, gradient);
    if (gives && !only_again) {
      hand_over(parameter, gradient, gradient.storage().nbytes() == parameter.nbytes);
    }
    if (!gives) {
      const bool is_view = gradient.defined() && gradient.data_ptr() == target;
      if (shadows_ && is_view && !only_again) parameter.kept = gradient.clone();
      items.push_back(to_unit(parameter, nullptr));
    } else if (gradient.data_ptr() == target && gradient.strides() == view_strides(parameter)) {
      // A bucket view, which is reduced along with its neighbours.
      if (!parameter.ready) parameter.kept = gradient.clone();
    } else if (!parameter.dense || !same_layout(parameter.variable, gradient)) {
      write_unit(parameter, gradient);
    } else {
      items.push_back(to_unit(parameter, gradient.data_ptr()));
    }
  }
  round_->copy(unit, CopyDirection::kToUnit, items);
}

void Reducer::deliver(const Bitmap& used) {
  const at::NoGradGuard no_grad;
  for (size_t u = 0; u < units_.size(); ++u) deliver_unit(static_cast<int>(u), used);
}

void Reducer::deliver_unit(int unit, const Bitmap& used) {
  std::vector<PackItem> items;
  for (const Member& member : units_[unit].members) {
    Parameter& parameter = parameters_[member.parameter];
    const at::Tensor kept = std::move(parameter.kept);
    if (!used.test(member.parameter)) {
      if (kept.defined()) parameter.variable.mutable_grad().copy_(kept);
    } else if (states_[unit].in_place != nullptr) {
      deliver_in_place(parameter, states_[unit]);
    } else {
      deliver_packed(parameter, items);
    }
  }
  round_->copy(unit, CopyDirection::kFromUnit, items);
}

// The mean is where the gradient was; only who looked away must be told.
void Reducer::deliver_in_place(Parameter& parameter, UnitState& state) {
  round_->unpin(state.in_place);
  state.in_place = nullptr;
  state.storage = c10::Storage();
  const at::Tensor& gradient = parameter.is_aside ? parameter.aside : parameter.variable.grad();
  gradient.unsafeGetTensorImpl()->bump_version();
}

void Reducer::deliver_packed(Parameter& parameter, std::vector<PackItem>& items) {
  at::Tensor& gradient = parameter.is_aside ? parameter.aside : parameter.variable.mutable_grad();
  check_present(parameter);
  const bool had_graph = gradient.defined() && gradient.requires_grad();  // create_graph
  if (had_graph) gradient = at::Tensor();
  fill_packed(parameter, gradient, items);
  if (!had_graph) return;
  round_->copy(parameter.unit, CopyDirection::kFromUnit, std::exchange(items, {}));
  gradient = without_derivative(gradient, parameter.name);
}

// Copies, or notes in `items` what is to be copied.
void Reducer::fill_packed(const Parameter& parameter, at::Tensor& gradient,
                          std::vector<PackItem>& items) {
  if (options_.bucket_view) {
    const bool is_view = gradient.defined() && gradient.data_ptr() == member_memory(parameter);
    if (!is_view) gradient = view_of(parameter);
    gradient.unsafeGetTensorImpl()->bump_version();
    return;
  }
  if (!gradient.defined()) gradient = like_unit(parameter, nullptr);
  check_memory(parameter.name, gradient);
  if (parameter.dense && same_layout(parameter.variable, gradient)) {
    items.push_back(from_unit(parameter, gradient.data_ptr()));
    gradient.unsafeGetTensorImpl()->bump_version();
  } else {
    gradient.detach().copy_(read_unit(parameter));
  }
}

// Last of all, so that a gradient which was ready several times in the backward is complete.
void Reducer::average_sparse() {
  std::vector<at::Tensor> variables;
  for (const int index : options_.sparse) {
    if (used_by_any_.test(index)) variables.push_back(parameters_[index].variable);
  }
  const int divisor = round_divisor_ > 0 ? round_divisor_ : round_->size();
  if (!variables.empty()) options_.average_sparse(variables, divisor, !shadows_, receives_);
}

// The unit's memory holds the mean of what came again; `first` the bucket of the first round where
// `.grad` are views of it.
void Reducer::add_second(int unit, const Bitmap& again, const at::Tensor& first) {
  if (first.defined()) bucket_of(unit).add_(first);
  for (const Member& member : units_[unit].members) {
    if (!again.test(member.parameter)) continue;
    Parameter& parameter = parameters_[member.parameter];
    at::Tensor& gradient = parameter.variable.mutable_grad();
    if (parameter.is_aside) gradient = std::move(parameter.aside);
    parameter.aside = at::Tensor();
    parameter.is_aside = false;
    if (!first.defined()) gradient.detach().add_(read_unit(parameter));
  }
}

}  // namespace pydist
