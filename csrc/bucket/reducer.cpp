#include "bucket/reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/clock.h"
#include "base/fork.h"
#include "base/python_boundary.h"

namespace pydist {

namespace {

// Of the elements, or of their real and imaginary parts.
DType real_dtype(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
    case at::kComplexFloat:
      return DType::kFloat32;
    case at::kDouble:
    case at::kComplexDouble:
      return DType::kFloat64;
    case at::kHalf:
      return DType::kFloat16;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      throw UsageError(concat("gradients of dtype ", toString(tensor.scalar_type()),
                              " cannot be reduced; keep such parameters out of the model or in a "
                              "buffer"));
  }
}

DType wire_dtype(DType own, std::optional<DType> wire) {
  return wire && dtype_nbytes(*wire) < dtype_nbytes(own) ? *wire : own;
}

constexpr const char* kUnused = "not used here";

bool has_buckets_only(const ReducerOptions& options) {
  return options.bucket_view || options.comm_hook;
}

}  // namespace

RoundOptions Reducer::plan(const std::vector<at::Tensor>& parameters,
                           const std::vector<std::string>& names, const ReducerOptions& options) {
  std::vector<ParameterSpec> specs;
  std::vector<int> order;
  const auto is_delayed = [&](size_t i) {
    return std::find(options.delayed.begin(), options.delayed.end(), static_cast<int>(i)) !=
           options.delayed.end();
  };
  for (size_t i = 0; i < parameters.size(); ++i) {
    ParameterSpec spec;
    spec.dtype = wire_dtype(real_dtype(parameters[i]), options.wire);
    spec.num_elements = parameters[i].numel() * (parameters[i].is_complex() ? 2 : 1);
    PYDIST_CHECK(!has_buckets_only(options) || spec.dtype == real_dtype(parameters[i]), UsageError,
                 "the gradient of parameter ", names[i], " is ",
                 toString(parameters[i].scalar_type()), " and cannot be a view of a bucket of ",
                 dtype_name(spec.dtype),
                 "; give either gradient_as_bucket_view=True or wire_dtype to ", options.name);
    // What is one tensor to others has one dtype, complex or real.
    spec.group = has_buckets_only(options) && parameters[i].is_complex() ? 1 : 0;
    spec.flat = is_delayed(i);
    if (spec.flat) spec.group += 2;
    specs.push_back(spec);
  }
  // Backward roughly reverses forward.
  for (int i = static_cast<int>(parameters.size()) - 1; i >= 0; --i) {
    if (!specs[i].flat) order.push_back(i);
  }
  order.insert(order.end(), options.delayed.rbegin(), options.delayed.rend());
  for (const int index : options.sparse) specs[index].num_elements = 0;  // in no unit
  LayoutOptions layout = options.layout;
  if (has_buckets_only(options)) layout.alone_nbytes = SIZE_MAX;
  RoundOptions round;
  round.units = make_layout(specs, order, layout);
  round.num_parameters = static_cast<int>(parameters.size());
  for (const Unit& unit : round.units) {
    const std::string& first = names[unit.members.front().parameter];
    round.unit_names.push_back(unit.members.size() == 1
                                   ? "parameter " + first
                                   : concat("a bucket of ", unit.members.size(), " parameters (",
                                            first, " to ", names[unit.members.back().parameter],
                                            ")"));
  }
  return round;
}

Reducer::Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
                 std::vector<Unit> units, std::unique_ptr<Round> round, ReducerOptions options)
    : parameters_(parameters.size()),
      units_(std::move(units)),
      states_(units_.size()),
      round_(std::move(round)),
      options_(std::move(options)),
      marks_(options_.backend, options_.marks_units),
      stats_(round_->size()),
      record_(static_cast<int>(parameters.size())),
      used_by_any_(static_cast<int>(parameters.size())),
      used_first_(static_cast<int>(parameters.size())) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    Parameter& parameter = parameters_[i];
    parameter.variable = parameters[i];
    parameter.name = names[i];
    parameter.nbytes = parameters[i].nbytes();
    parameter.dtype = parameters[i].scalar_type();
    parameter.element_dtype = real_dtype(parameters[i]);
    parameter.sizes = parameters[i].sizes().vec();
    parameter.strides = parameters[i].strides().vec();
    // A hook reads a bucket's gradients as row-major, whatever the parameter's strides.
    parameter.dense = options_.comm_hook ? parameters[i].is_contiguous()
                                         : parameters[i].is_non_overlapping_and_dense();
  }
  for (const int index : options_.sparse) parameters_[index].sparse = true;
  for (size_t u = 0; u < units_.size(); ++u) {
    for (const Member& member : units_[u].members) {
      parameters_[member.parameter].unit = static_cast<int>(u);
      parameters_[member.parameter].begin = member.begin;
    }
  }
  for (const int index : options_.delayed) {
    if (parameters_[index].unit >= 0) states_[parameters_[index].unit].gated = true;
  }
  if (options_.born_in_arena && !has_buckets_only(options_)) GradientAllocator::install();
  // Ranks that have to ask each other do it here: their first backwards may be of other models.
  Bitmap frozen(static_cast<int>(units_.size()));
  for (size_t u = 0; u < units_.size(); ++u) {
    const auto& members = units_[u].members;
    if (std::none_of(members.begin(), members.end(), [&](const Member& member) {
          return parameters_[member.parameter].variable.requires_grad();
        })) {
      frozen.set(static_cast<int>(u));
    }
  }
  round_->leave_out(frozen);
  agreed_trainable_ = trainable();
}

Reducer::~Reducer() {
  if (open_) abandon_round("its model was destroyed in the middle of a backward");
  detach_hooks();
}

// Closes the round when the graph task ends. When backward raises, autograd destroys the callback
// without running it: then peers must learn at once that this rank's gradients will never come.
class RoundGuard {
 public:
  explicit RoundGuard(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  RoundGuard(const RoundGuard&) = delete;
  ~RoundGuard() {
    if (reducer_->open_) reducer_->abandon_round("raised in backward");
  }
  void close() {
    reducer_->guard([this] { reducer_->close_round(); });
  }

 private:
  std::shared_ptr<Reducer> reducer_;
};

// Ends a backward that only accumulates, whether it raises or not.
class LocalGuard {
 public:
  explicit LocalGuard(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {}
  LocalGuard(const LocalGuard&) = delete;
  ~LocalGuard() { close(); }
  void close() {
    reducer_->only_local_ = false;
    reducer_->expected_.disarm();
  }

 private:
  std::shared_ptr<Reducer> reducer_;
};

void Reducer::guard(const std::function<void()>& action) {
  try {
    failing_together(action);
  } catch (const Error&) {
    rethrow_through_torch(std::current_exception());
  }
}

// What is not our own error, as an interrupt, is told to peers by whoever owns the backward.
void Reducer::failing_together(const std::function<void()>& action) {
  try {
    action();
  } catch (const UsageError& error) {
    abandon_if_open(error);
    throw named(error);
  } catch (const Error& error) {
    abandon_if_open(error);
    throw;
  }
}

void Reducer::abandon_if_open(const Error& error) noexcept {
  expecting_ = false;  // another wrapper may have the module from now on
  last_error_ = error.what();
  if (open_) abandon_round(concat("raised in backward (", error.what(), ")"));
}

// What went wrong on this rank alone says which one it is; other errors do already.
UsageError Reducer::named(const UsageError& error) const {
  return UsageError(concat("on ", round_->describe(round_->rank()), ", ", error.what()));
}

void Reducer::arm() {
  if (!options_.born_in_arena || has_buckets_only(options_)) return;
  std::vector<size_t> sizes;
  for (const Parameter& parameter : parameters_) {
    if (parameter.unit < 0 || !units_[parameter.unit].alone || narrowed(parameter)) continue;
    if (parameter.variable.requires_grad() && !parameter.variable.grad().defined()) {
      sizes.push_back(parameter.nbytes);
    }
  }
  expected_.arm(sizes);
}

// True if the graph task that is running accumulates into at least one of the parameters:
// torch.autograd.grad does not.
bool Reducer::task_accumulates() const {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info == nullptr || exec_info->empty()) return true;  // a plain backward()
  for (const Parameter& parameter : parameters_) {
    const auto found = exec_info->find(parameter.accumulator.get());
    if (found != exec_info->end() && found->second.needed_) return true;
  }
  return false;
}

void Reducer::on_output(bool synchronize) {
  if (open_) return;
  if (!task_accumulates()) {
    if (synchronize && at::GradMode::is_enabled()) {
      inner_gradient_ = true;
      inner_round_ = counters_.num_rounds;
    }
    return;
  }
  if (synchronize && reduces()) {
    open_round(true);
    return;
  }
  if (only_local_) return;
  only_local_ = true;
  arm();
  auto guard = std::make_shared<LocalGuard>(shared_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([guard] { guard->close(); });
}

// Without a hook on an output (it was hidden from us) the first parameter opens the round, maybe in
// a graph task within another (reentrant checkpointing): the round ends with that task, and what
// comes later in the same backward needs further rounds, so we go on expecting until the next
// forward.
void Reducer::open_round(bool by_output) {
  auto guard = std::make_shared<RoundGuard>(shared_from_this());
  torch::autograd::Engine::get_default_engine().queue_callback([guard] { guard->close(); });
  begin_round(divisor_);
  by_output_ = by_output;
  if (by_output) expecting_ = inner_gradient_;
  arm();
}

void Reducer::begin_round(int divisor) {
  read_late_records();
  round_->begin(divisor);
  round_divisor_ = divisor;
  stats_.open(monotonic_ns());
  ready_order_.clear();
  open_ = true;
  for (Parameter& parameter : parameters_) {
    parameter.ready = false;
    parameter.handed = nullptr;
    parameter.counted = parameter.variable.requires_grad();
  }
  gate_open_ = false;
  const bool choose = options_.skip_unused && counters_.num_rounds > 0;
  Bitmap frozen(static_cast<int>(units_.size()));
  for (size_t u = 0; u < units_.size(); ++u) {
    UnitState& state = states_[u];
    int num_counted = 0;
    bool was_used = false;  // in the last round, and the same on all ranks
    for (const Member& member : units_[u].members) {
      num_counted += parameters_[member.parameter].counted ? 1 : 0;
      was_used = was_used || used_by_any_.test(member.parameter);
    }
    state.published = false;
    state.missing = num_counted + (state.gated ? 1 : 0);
    state.late = choose && !was_used && round_->postpone(static_cast<int>(u));
    if (num_counted == 0) frozen.set(static_cast<int>(u));
  }
  if (!round_->leave_out(frozen)) return;
  for (size_t u = 0; u < units_.size(); ++u) {
    states_[u].late = states_[u].late || frozen.test(static_cast<int>(u));
  }
}

// A function may give None, and a parameter that was frozen since its forward accumulates nothing.
bool Reducer::accumulates(const Parameter& parameter, const std::vector<at::Tensor>& incoming) {
  return !incoming.empty() && incoming[0].defined() && parameter.variable.requires_grad();
}

void Reducer::before_accumulation(int index, const std::vector<at::Tensor>& incoming) {
  Parameter& parameter = parameters_[index];
  if (!accumulates(parameter, incoming)) return;
  if (defers(index)) defer_hook(index);
  if (!open_ || parameter.unit < 0 || !states_[parameter.unit].published) return;
  // Peers may be reading and writing this gradient's memory: let autograd fill another.
  if (parameter.is_aside) return;
  parameter.is_aside = true;
  parameter.aside = parameter.variable.grad();
  parameter.variable.mutable_grad() = at::Tensor();
}

void Reducer::after_accumulation(int index, const std::vector<at::Tensor>& incoming) {
  Parameter& parameter = parameters_[index];
  if (!accumulates(parameter, incoming)) return;
  record_.used.set(index);
  if (parameter.unit >= 0) expected_.arrived(parameter.nbytes);
  if (!open_ && expecting_ && reduces()) open_round(false);
  if (open_ && index == options_.gate) open_gate(incoming);
  if (!open_) return;
  const at::Tensor& gradient = parameter.variable.grad();
  PYDIST_CHECK(gradient.defined(), UsageError, "the gradient of parameter ", parameter.name,
               " was gone as soon as it was accumulated: a hook on its AccumulateGrad node set it "
               "to None, but ranks have not averaged it yet; use "
               "register_post_accumulate_grad_hook, whose hooks run after that");
  if (parameter.unit < 0) return;
  PYDIST_CHECK(gradient.layout() == at::kStrided, UsageError, "the gradient of parameter ",
               parameter.name, " is sparse, but no Embedding or EmbeddingBag of ", options_.name,
               " had it with sparse=True when it was wrapped; say so there, or keep the gradient "
               "dense");
  round_->accumulated(parameter.unit);
  if (states_[parameter.unit].published) {
    record_.again.set(index);
  } else if (!parameter.ready) {
    parameter.ready = true;
    ready_order_.push_back(index);
    if (parameter.counted && --states_[parameter.unit].missing == 0) publish_ready(index, incoming);
  }
  round_->progress();
}

void Reducer::open_gate(const std::vector<at::Tensor>& incoming) {
  if (gate_open_) return;
  gate_open_ = true;
  for (size_t u = 0; u < units_.size(); ++u) {
    if (!states_[u].gated || --states_[u].missing > 0) continue;
    publish_ready(units_[u].members.front().parameter, incoming);
  }
}

// All of the parameter's unit is ready.
void Reducer::publish_ready(int index, const std::vector<at::Tensor>& incoming) {
  const int unit = parameters_[index].unit;
  if (states_[unit].late || publish_late_) return;
  if (const char* reason = publish_in_place(unit, incoming)) publish_packed(unit, reason);
}

// Null if the unit is published, else why it has to be packed.
const char* Reducer::publish_in_place(int unit, const std::vector<at::Tensor>& incoming) {
  if (!units_[unit].alone) return bucket_reason();
  Parameter& parameter = parameters_[units_[unit].members.front().parameter];
  const at::Tensor& gradient = parameter.variable.grad();
  if (!gradient.defined() || gradient.layout() != at::kStrided) return kUnused;
  if (const char* reason = why_not_in_place(parameter, gradient, incoming)) return reason;
  UnitState& state = states_[unit];
  state.in_place = gradient.data_ptr();
  hand_over(parameter, gradient, true);
  state.storage = gradient.storage();
  round_->pin(state.in_place);
  counters_.born_nbytes += parameter.nbytes;
  publish(unit, state.in_place);
  return nullptr;
}

void Reducer::publish_packed(int unit, const char* reason) {
  pack_unit(unit, false);
  counters_.packed_nbytes[reason] += units_[unit].nbytes();
  publish(unit, round_->unit_memory(unit));
}

void Reducer::publish(int unit, void* data) {
  states_[unit].published = true;
  if (!stats_.published()) stats_.publish(monotonic_ns());
  marks_.unit_published();
  round_->publish(unit, data);
}

void Reducer::publish_missing(const Bitmap* wanted) {
  for (size_t u = 0; u < units_.size(); ++u) {
    if (states_[u].published || (wanted == nullptr && states_[u].late)) continue;
    bool any = wanted == nullptr;
    bool used = false;  // maybe in an earlier backward
    for (const Member& member : units_[u].members) {
      any = any || wanted->test(member.parameter);
      used = used || record_.used.test(member.parameter);
    }
    if (!any) continue;
    const int unit = static_cast<int>(u);
    const char* reason = used ? publish_in_place(unit, {}) : kUnused;
    if (reason != nullptr) publish_packed(unit, reason);
  }
}

}  // namespace pydist
