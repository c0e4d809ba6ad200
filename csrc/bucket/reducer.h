// Turns a module's backward into rounds: watches its parameters and outputs, publishes gradients,
// leaves means in `.grad`.
//
// A pre-hook on the grad_fn of a wrapped forward's outputs marks the start of a backward and opens
// a round; a post-hook on each parameter's AccumulateGrad node marks a gradient as ready; a
// callback that the outermost graph task runs at its end closes the round. In between, units are
// published as they become ready:
//
//   alone unit    zero-copy if the gradient lies in the arena and this process provably holds its
//   memory alone,
//                 else packed into the unit's own memory and copied back
//   bucket        packed once all its trainable members are ready
//
// With bucket views, or a communication hook, all units are buckets.
//
// Users' post-accumulate hooks are put off until the gradient is the mean: they run at the end of
// the round, on every rank, for every parameter that some rank used since the round before.
//
// At the end ranks agree on who used which parameter. A parameter used on any rank is averaged over
// all of them: whoever did not use it contributes its current `.grad`, zeros where there is none. A
// parameter used nowhere keeps its `.grad` as it was. A parameter that became ready again after its
// unit was published (reentrant checkpointing) got a fresh `.grad` from autograd meanwhile; those
// are reduced in a second round, and added.
//
// Parameters that are declared sparse are in no unit: those that any rank used are handed to
// `average_sparse` at the end of the round.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bucket/gradient_allocator.h"
#include "bucket/layout.h"
#include "bucket/pack.h"
#include "bucket/profiler_marks.h"
#include "bucket/round.h"
#include "bucket/round_stats.h"

namespace pydist {

// Leaves the mean of the parameters' sparse gradients in `.grad`: their sum over ranks, divided by
// `divisor`. Collective: all ranks give the same parameters, in the same order. A rank that does
// not contribute takes part without gradients of its own; if it does not receive, its `.grad` stay.
using AverageSparse = std::function<void(const std::vector<at::Tensor>& parameters, int divisor,
                                         bool contributes, bool receives)>;

struct ReducerOptions {
  std::string name = "DataParallel";  // for messages
  std::string backend = "gloo";       // the process group's, for the profiler
  bool marks_units = true;            // show the reduction of units to the profiler
  LayoutOptions layout;
  bool bucket_view = false;   // `.grad` are views of buckets
  bool comm_hook = false;     // units are buckets that a communication hook gets
  bool born_in_arena = true;  // arm the gradient allocator
  std::optional<DType> wire;  // in which gradients of wider types travel
  std::vector<int> delayed;   // parameters that wait for the gate's gradient, in units of their own
  int gate = -1;              // a parameter
  bool skip_unused = false;   // units that were unused in the round before travel only if needed
  std::vector<int> sparse;    // parameters whose gradients are sparse
  AverageSparse average_sparse;
  bool unused_is_error = false;  // a round raises where a rank did not use a trainable parameter
  bool reduces_alone = false;    // also a group of one rank, for tests and benchmarks of one device
};

// What the reducer did since it was made.
struct ReducerCounters {
  uint64_t num_rounds = 0;
  uint64_t born_nbytes = 0;                       // reduced where autograd wrote them
  std::map<std::string, uint64_t> packed_nbytes;  // copied, by reason
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  // How the given parameters are laid out in units; the same on all ranks if the parameters are.
  static RoundOptions plan(const std::vector<at::Tensor>& parameters,
                           const std::vector<std::string>& names, const ReducerOptions& options);

  // `round` was made from plan() of the same arguments.
  Reducer(std::vector<at::Tensor> parameters, std::vector<std::string> names,
          std::vector<Unit> units, std::unique_ptr<Round> round, ReducerOptions options);
  ~Reducer();

  // To be called before every forward whose backward is wanted. Hooks what is new; raises
  // UsageError where a parameter is no longer what was wrapped, and PeerError where the group has
  // failed.
  void prepare(bool synchronize);
  // To be called after it with the outputs' tensors: a backward that starts from one of them is a
  // round if `synchronize`, else it only accumulates.
  void watch(const std::vector<at::Tensor>& outputs, bool synchronize);
  // Removes every hook; the module may live on.
  void detach_hooks();
  // Units handed to the round since the last one began.
  std::vector<int> published() const;
  // The module has another tensor in a parameter's place from now on; prepare() hooks it.
  void replace(int index, at::Tensor variable);
  std::vector<at::Tensor> parameters() const;
  // Tells peers that this rank will not train on, before it raises elsewhere than in backward.
  void fail(const std::string& reason) noexcept { round_->fail(reason); }

  // Tells that this rank has just waited for peers elsewhere, so that it does not count as late.
  void discount_wait(int64_t waited_ns) { stats_.discount(waited_ns); }

  // From the next round on the mean divides by this, the same on all ranks; 0: by their number.
  void set_divisor(int divisor) { divisor_ = divisor; }
  // Runs at the end of each backward, before this rank waits for the others; empty: nothing.
  void set_before_end(std::function<void()> action) { before_end_ = std::move(action); }
  // Rounds around the last of many backwards, which the caller brackets (reducer_brackets.cpp).
  // Errors reach the peers, as those of the hooks do.
  void begin_backward(bool last);
  void end_backward();
  void progress();
  void finish_round();
  // No further round is possible, as far as this rank knows.
  bool has_failed() const;
  // The caller will not go on with the round, be it open or still to come; peers raise PeerError
  // with `reason`, a whole sentence. For good.
  void give_up(const std::string& reason) noexcept;

  // Takes part in a round of the others, without a backward and with zeros for gradients. `.grad`
  // stay as they are, unless the rank `receives` the means like the others.
  void shadow_round(int divisor, bool receives);

  const ReducerCounters& counters() const { return counters_; }
  const RoundStats& stats() const { return stats_; }
  // What this rank raised last; empty if nothing.
  const std::string& last_error() const { return last_error_; }
  const Round& round() const { return *round_; }
  const std::vector<Unit>& units() const { return units_; }
  // In the last round no rank used some trainable parameter; or the set of used ones differs from
  // the first round's. Cheap.
  bool last_round_had_unused() const { return last_had_unused_; }
  bool last_round_changed() const { return !(used_by_any_ == used_first_); }
  // Parameters that no rank used in the last round.
  std::vector<int> unused_in_last_round() const;
  // Parameters that some ranks did not use in the last round, with these ranks.
  std::vector<std::pair<int, std::vector<int>>> unused_by_rank() const;
  // Parameters in the order in which their gradients were ready in the last round.
  const std::vector<int>& ready_order() const { return last_ready_order_; }
  // Parameters whose use changed between the first round and the last.
  std::vector<int> changed_since_first_round() const;
  // Some round used other parameters than the first.
  bool ever_changed() const { return ever_changed_; }
  // A round is going on.
  bool is_open() const { return open_; }

  // Runs `action` once, at the end of the next round, in the thread that closes it.
  void call_after_round(std::function<void()> action) { after_round_.push_back(std::move(action)); }

  // Gradients of backwards since the last round are waiting to be reduced.
  bool has_unreduced() const { return record_.used.any(); }

  // Called by the hooks (reducer_hooks.cpp). guard() runs what may raise: it tells peers of an
  // error before the error goes on to Python.
  void guard(const std::function<void()>& action);
  void on_output(bool synchronize);
  void before_accumulation(int index, const std::vector<at::Tensor>& incoming);
  void after_accumulation(int index, const std::vector<at::Tensor>& incoming);
  // True if a round will average the parameter's gradients, so that its hooks have to wait.
  bool is_averaged(int index) const;
  bool defers(int index) const;

 private:
  friend class RoundGuard;
  friend class LocalGuard;
  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

  struct Parameter {
    at::Tensor variable;
    std::string name;
    int unit = -1;        // none for what has no elements, or sparse gradients
    bool sparse = false;  // declared so
    int64_t begin = 0;    // first element within the unit
    size_t nbytes = 0;
    at::ScalarType dtype = at::kFloat;
    DType element_dtype = DType::kFloat32;  // real, also where the gradient is complex
    std::vector<int64_t> sizes, strides;    // as planned; must stay
    bool dense = true;                      // strides cover the storage without gaps or overlap
    Accumulator accumulator;                // null until it requires grad
    torch::autograd::FunctionPreHook* pre_hook = nullptr;
    uintptr_t post_hook = 0;
    // Of this round:
    bool ready = false;
    void* handed = nullptr;  // where `.grad` lay when its unit was published; null without one
    int64_t version = -1;    // and its version, where no other tensor counts along
    at::Tensor kept;         // a copy of `.grad`, to be restored if no rank used the parameter
    bool counted = false;    // among those that its unit waits for
    bool is_aside = false;   // there is something in `aside`, if only an undefined gradient
    at::Tensor aside;        // `.grad` while its memory is published and autograd fills another
  };
  struct UnitState {
    int missing = 0;     // trainable members that are not ready, and the gate
    bool gated = false;  // waits for the gate
    bool late = false;   // nobody used it in the last round: travels after end(), if at all
    bool published = false;
    void* in_place = nullptr;  // the gradient's own memory, pinned
    c10::Storage storage;      // that memory's, so that it outlives `.grad`
    at::Tensor bucket;         // bucket_view: what `.grad` are views of
  };

  static bool accumulates(const Parameter& parameter, const std::vector<at::Tensor>& incoming);
  void failing_together(const std::function<void()>& action);
  void abandon_if_open(const Error& error) noexcept;
  UsageError named(const UsageError& error) const;
  void defer_hook(int index);
  void run_deferred_hooks();
  void check_unchanged(const Parameter& parameter) const;
  void hook_parameters();
  void unhook(Parameter& parameter);
  // Of the round.
  void arm();
  bool task_accumulates() const;
  void open_round(bool by_output);
  void begin_round(int divisor);
  void close_round();
  void settle_round();
  void abandon_round(const std::string& reason) noexcept;
  void drop_round(const std::string& reason) noexcept;
  void open_gate(const std::vector<at::Tensor>& incoming);
  void publish_ready(int index, const std::vector<at::Tensor>& incoming);
  const char* publish_in_place(int unit, const std::vector<at::Tensor>& incoming);
  const char* bucket_reason() const {
    if (options_.comm_hook) return "communication hook";
    return options_.bucket_view ? "bucket view" : "small";
  }
  void publish_packed(int unit, const char* reason);
  void publish(int unit, void* data);
  // Publishes what this rank still owes: units with a wanted member; where `wanted` is null, all
  // but the late ones.
  void publish_missing(const Bitmap* wanted);
  void second_round(const Bitmap& again);
  void average_sparse();
  Bitmap trainable() const;
  bool reduces() const {
    return round_->size() > 1 || options_.comm_hook || options_.reduces_alone;
  }
  void check_trainable(const std::vector<RoundRecord>& records) const;
  void check_again(const std::vector<RoundRecord>& records) const;
  // A backward should give it a gradient.
  static bool is_expected(const Parameter& parameter) {
    return parameter.variable.requires_grad() && (parameter.unit >= 0 || parameter.sparse);
  }
  void raise_if_unused() const;
  void announce_end();
  Bitmap agree();
  std::string why_answer_is_needed() const;
  void note_use(const std::vector<RoundRecord>& records);
  void note_meeting(const std::vector<RoundRecord>& records);
  void read_late_records();
  // Between gradients and units.
  // The gradient travels in another type than its own.
  bool narrowed(const Parameter& parameter) const {
    return parameter.unit >= 0 && units_[parameter.unit].dtype != parameter.element_dtype;
  }
  int64_t num_elements(const Parameter& parameter) const {
    return static_cast<int64_t>(parameter.nbytes / dtype_nbytes(parameter.element_dtype));
  }
  PackItem to_unit(const Parameter& parameter, const void* source) const;
  PackItem from_unit(const Parameter& parameter, void* target) const;
  const char* why_not_in_place(const Parameter& parameter, const at::Tensor& gradient,
                               const std::vector<at::Tensor>& incoming) const;
  void check_present(const Parameter& parameter) const;
  void hand_over(Parameter& parameter, const at::Tensor& gradient, bool exclusive);
  void check_handed() const;
  void pack_unit(int unit, bool only_again);
  void deliver(const Bitmap& used);
  void deliver_in_place(Parameter& parameter, UnitState& state);
  void deliver_unit(int unit, const Bitmap& used);
  void deliver_packed(Parameter& parameter, std::vector<PackItem>& items);
  void fill_packed(const Parameter& parameter, at::Tensor& gradient, std::vector<PackItem>& items);
  void add_second(int unit, const Bitmap& again, const at::Tensor& first);
  at::Tensor bucket_of(int unit);
  at::Tensor view_of(const Parameter& parameter);
  static c10::DimVector view_strides(const Parameter& parameter);
  at::Tensor like_unit(const Parameter& parameter, void* memory) const;
  void write_unit(const Parameter& parameter, const at::Tensor& gradient) const;
  at::Tensor read_unit(const Parameter& parameter) const;
  uint8_t* member_memory(const Parameter& parameter) const;
  void release_pins(bool quiet) noexcept;

  std::vector<Parameter> parameters_;
  std::vector<Unit> units_;
  std::vector<UnitState> states_;
  std::unique_ptr<Round> round_;
  ReducerOptions options_;
  ProfilerMarks marks_;
  ReducerCounters counters_;
  RoundStats stats_;
  std::string last_error_;
  std::vector<int> ready_order_;       // of this round
  std::vector<int> last_ready_order_;  // of the last
  std::vector<Bitmap> last_used_;      // by rank
  ExpectedSizes expected_;
  RoundRecord record_;
  Bitmap used_by_any_;
  Bitmap agreed_trainable_;  // as the last answer, or the start, had it
  Bitmap used_first_;
  bool last_had_unused_ = false;
  bool ever_changed_ = false;
  std::vector<std::function<void()>> after_round_;
  bool open_ = false;        // a round is going on
  bool gate_open_ = false;   // its gradient has come in this round
  bool only_local_ = false;  // a backward goes on that only accumulates
  bool by_output_ = false;   // the round was opened by an output's hook
  bool expecting_ = false;   // a parameter may open a round: see open_round()
  // A communication hook gets every bucket once a backward: where parameters become ready again,
  // buckets wait for the end of backward from then on.
  bool publish_late_ = false;
  // torch.autograd.grad(create_graph=True) went through an output: the backward of what it gave,
  // which need not pass the output again, is a round too.
  bool inner_gradient_ = false;
  uint64_t inner_round_ = 0;  // the number of rounds before it
  int divisor_ = 0;           // of the next round
  int round_divisor_ = 0;     // of this one
  bool shadows_ = false;      // this round has no backward here; its gradients are zeros
  bool receives_ = true;      // `.grad` become the means
  std::function<void()> before_end_;
};

}  // namespace pydist
