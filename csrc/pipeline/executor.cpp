#include "pipeline/executor.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>
#include <unistd.h>

#include <utility>

#include "base/check.h"
#include "base/device_handles.h"
#include "pipeline/own_memory.h"

namespace pydist {

namespace {

const char* word(ActionKind kind) {
  switch (kind) {
    case ActionKind::kForward:
      return "forward";
    case ActionKind::kBackward:
      return "backward";
    case ActionKind::kInput:
      return "input backward";
    case ActionKind::kWeight:
      return "weight backward";
  }
  return "action";
}

// "2F3 (forward of stage 2 for microbatch 3)"
std::string text_of(const Action& action) {
  return concat(action.text(), " (", word(action.kind), " of stage ", action.stage,
                " for microbatch ", action.microbatch, ")");
}

bool is_capturing(const std::optional<c10::Device>& device) {
  if (!device) return false;
  const DeviceGuard guard(device->index());
  return device_runtime()->is_capturing(device_runtime()->current_stream());
}

bool takes_part(const Action& action, StepKind kind) {
  return action.kind == ActionKind::kForward || kind == StepKind::kTrain;
}

}  // namespace

Executor::Executor(ExecutorOptions options)
    : options_(std::move(options)), plan_(lower(options_.schedule, options_.rank)) {
  index_of_stage_.assign(options_.schedule.num_stages(), -1);
  for (LocalStage& local : options_.stages) add_stage(std::move(local));
  options_.stages.clear();
}

void Executor::add_stage(LocalStage local) {
  const Schedule& schedule = options_.schedule;
  const int number = local.stage;
  Stage stage;
  stage.is_last = number == schedule.num_stages() - 1;
  if (number > 0) stage.in.push_back({0, number - 1, schedule.rank_of_stage[number - 1]});
  if (!stage.is_last) stage.out.push_back({0, number + 1, schedule.rank_of_stage[number + 1]});
  stage.in.insert(stage.in.end(), local.skips_in.begin(), local.skips_in.end());
  stage.out.insert(stage.out.end(), local.skips_out.begin(), local.skips_out.end());
  for (int i = 0; i < schedule.num_microbatches; ++i) {
    stage.flights.emplace_back(stage.in.size(), stage.out.size());
  }
  stage.context.stage = number;
  stage.context.base_seed = options_.base_seed;
  stage.context.data_parallel_rank = options_.data_parallel_rank;
  stage.context.device = options_.device;
  stage.local = std::move(local);
  index_of_stage_[number] = static_cast<int>(stages_.size());
  stages_.push_back(std::move(stage));
}

std::optional<Message> Executor::run(StepOptions options) {
  // Casts of weights that an enclosing autocast made before the last optimizer step are stale.
  at::autocast::clear_cache();
  step_ = std::move(options);
  const at::AutoGradMode gradients(step_.kind == StepKind::kTrain);
  recorder_.begin_step();
  current_.reset();
  has_ended_ = false;
  num_last_forwards_ = 0;
  const bool is_captured = is_capturing(options_.device);
  for (Stage& stage : stages_) {
    stage.was_cut = false;
    stage.context.is_captured = is_captured;
  }
  try {
    if (options_.channel != nullptr) options_.channel->begin_step(step_.kind);
    run_actions();
    end_step();
  } catch (...) {
    drop_step();
    throw;
  }
  step_ = {};
  return std::exchange(result_, std::nullopt);
}

void Executor::run_actions() {
  for (const Step& step : plan_) {
    run_action(step.first);
    // An overlapped pair: on a CPU nothing is won by running both at once, and a device has both
    // enqueued before it is done with the first.
    if (step.second) run_action(*step.second);
  }
  current_.reset();
  has_ended_ = true;
}

void Executor::run_action(const PlannedAction& planned) {
  const Action& action = planned.action;
  if (!takes_part(action, step_.kind)) return;
  current_ = action;
  Stage& stage = stages_[index_of_stage_[action.stage]];
  recorder_.begin(action);
  Reducer* const reducer = reducer_of(action);
  const bool is_last = planned.completes_gradients && step_.averages;
  if (reducer != nullptr) reducer->begin_backward(is_last);
  dispatch(stage, stage.flights[action.microbatch], action);
  if (reducer != nullptr) reducer->end_backward();
  recorder_.end();
}

void Executor::dispatch(Stage& stage, StageFlight& flight, const Action& action) {
  if (action.kind == ActionKind::kForward) {
    forward(stage, flight, action.microbatch);
    return;
  }
  if (!flight.absent) {
    if (action.kind == ActionKind::kWeight) {
      flight.backward->weight();
    } else {
      take_gradients(stage, flight, action.microbatch);
      if (action.kind == ActionKind::kInput) {
        flight.backward->input(gradients_, /*split_checkpointed=*/stage.was_cut);
        stage.was_cut = stage.was_cut || flight.backward->was_cut();
        warn_if_unsplit(stage, flight);
      } else {
        flight.backward->backward(gradients_);
      }
      gradients_.clear();
      give_gradients(stage, flight, action.microbatch);
    }
  }
  if (action.kind != ActionKind::kInput) flight.clear();
}

void Executor::forward(Stage& stage, StageFlight& flight, int microbatch) {
  Message input;
  received_.clear();
  stage.context.skips.clear();
  const Rows rows =
      stage.in.empty() ? own_rows(microbatch) : take_inputs(stage, flight, microbatch, input);
  check_rows(rows, microbatch);
  flight.absent = rows.absent;
  output_.structure.clear();
  output_.slots.clear();
  output_.roots.clear();
  if (!flight.absent) {
    stage.context.step = step_.step;
    stage.context.microbatch = microbatch;
    stage.context.training = step_.kind == StepKind::kTrain;
    const StageScope scope(stage.context);
    const bool is_first = stage.local.stage == 0;
    stage.local.code->forward(stage.context, is_first ? nullptr : &input, output_);
  }
  give_outputs(stage, flight, microbatch, rows);
  if (stage.is_last && ++num_last_forwards_ == options_.schedule.num_microbatches) {
    send_result(stage);
  }
}

Executor::Rows Executor::own_rows(int microbatch) const {
  if (!step_.num_rows) return {};
  const size_t index = static_cast<size_t>(microbatch);
  if (index >= step_.num_rows->size()) return {true, 0};
  return {false, (*step_.num_rows)[index]};
}

// Where ranks are given batches of different sizes, losses may go well and weights be wrong.
void Executor::check_rows(const Rows& rows, int microbatch) const {
  const Rows own = own_rows(microbatch);
  const bool known = step_.num_rows && (rows.absent || rows.number >= 0);
  PYDIST_CHECK(!known || (own.absent == rows.absent && own.number == rows.number), MismatchError,
               "microbatch ", microbatch, " has ", rows.number,
               " rows on the first stage's rank, but ", own.number,
               " of what this rank was given; pass a batch and a target of as many rows");
}

// Fills `input` with the neighbour's value, and the context with skips.
Executor::Rows Executor::take_inputs(Stage& stage, StageFlight& flight, int microbatch,
                                     Message& input) {
  Rows rows;
  for (size_t k = 0; k < stage.in.size(); ++k) {
    const Link& link = stage.in[k];
    const MessageKey key{MessageKind::kActivation, stage.local.stage, microbatch, link.port};
    Message message = obtain(link, key, flight.inputs[k]);
    if (link.port == 0) rows = {message.absent, message.num_rows};
    for (Slot& slot : message.slots) {
      const bool wanted = slot.requires_grad && step_.kind == StepKind::kTrain;
      flight.from[k].add(wanted);
      if (wanted) received_.emplace_back(slot.tensor, slot.tensor);
    }
    if (link.port == 0) {
      input = std::move(message);
    } else if (!message.absent) {
      stage.context.skips.put(link.skip, std::move(message.slots.at(0).tensor));
    }
  }
  return rows;
}

void Executor::give_outputs(Stage& stage, StageFlight& flight, int microbatch, const Rows& rows) {
  const size_t num_slots = output_.slots.size();
  if (!flight.absent) add_skips(stage);
  if (!flight.absent && step_.kind == StepKind::kTrain) {
    PYDIST_CHECK(!stage.is_last || output_.roots.at(0).is_valid(), UsageError,
                 "the loss does not require a gradient: neither the output that loss_fn got nor "
                 "what else it used does; unfreeze a parameter, or call evaluate()");
    if (stage.is_last) flight.loss = std::move(output_.slots[0].tensor);
    flight.backward.emplace(output_.roots, std::exchange(received_, {}));
  }
  auto slot = output_.slots.begin();
  auto root = output_.roots.begin();
  for (size_t k = 0; k < stage.out.size(); ++k) {
    const Link& link = stage.out[k];
    Message message{{MessageKind::kActivation, link.stage, microbatch, link.port}};
    message.absent = rows.absent;
    message.num_rows = rows.number;
    if (link.port == 0) message.structure = std::move(output_.structure);
    for (size_t left = flight.absent ? 0 : link.port == 0 ? num_slots : 1; left > 0; --left) {
      flight.to[k].add((root++)->is_valid());
      message.slots.push_back(std::move(*slot++));
    }
    deliver(link, std::move(message));
  }
  output_.roots.clear();  // the graph is the flight's now
  if (step_.kind != StepKind::kTrain) flight.clear();
}

// What the forward has stashed for other stages, after the slots of its own output.
void Executor::add_skips(Stage& stage) {
  for (const Link& link : stage.out) {
    if (link.port == 0) continue;
    const std::optional<at::Tensor> tensor = stage.context.skips.take(link.skip);
    PYDIST_CHECK(tensor.has_value(), UsageError, "skip '", link.skip, "' was not stashed by stage ",
                 stage.local.stage, ", and stage ", link.stage, " is to pop it");
    output_.add(*tensor);
  }
}

void Executor::take_gradients(Stage& stage, StageFlight& flight, int microbatch) {
  gradients_.clear();
  for (size_t k = 0; k < stage.out.size(); ++k) {
    const Link& link = stage.out[k];
    const size_t num_slots = flight.to[k].size();
    if (!flight.to[k].any()) {
      gradients_.resize(gradients_.size() + num_slots);
      continue;
    }
    const MessageKey key{MessageKind::kGradient, stage.local.stage, microbatch, link.port};
    const Message message = obtain(link, key, flight.gradients[k]);
    PYDIST_CHECK(message.slots.size() == num_slots, Error, "stage ", link.stage, " sent ",
                 message.slots.size(), " gradients for ", num_slots, " tensors");
    for (const Slot& slot : message.slots) gradients_.push_back(slot.tensor);
  }
  if (stage.is_last) gradients_.push_back(loss_gradient(flight.loss, microbatch));
}

void Executor::give_gradients(Stage& stage, StageFlight& flight, int microbatch) {
  const std::vector<at::Tensor> gradients = flight.backward->input_gradients();
  auto gradient = gradients.begin();
  for (size_t k = 0; k < stage.in.size(); ++k) {
    const GradientSlots& slots = flight.from[k];
    if (!slots.any()) continue;
    Message message{{MessageKind::kGradient, stage.in[k].stage, microbatch, stage.in[k].port}};
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      message.slots.push_back({slots.wants(slot) ? *gradient++ : at::Tensor()});
    }
    deliver(stage.in[k], std::move(message));
  }
}

// A new one for each: a `.grad` may become a view of it, to which the next microbatch adds.
at::Tensor Executor::loss_gradient(const at::Tensor& loss, int microbatch) const {
  return at::full(loss.sizes(), step_.loss_gradients.at(microbatch), loss.options());
}

Message Executor::obtain(const Link& link, const MessageKey& key,
                         std::optional<Message>& handed_over) {
  if (link.rank != options_.rank) {
    if (!step_.reducers.empty() && !options_.channel->has_arrived(link.rank, key)) {
      for (const auto& [number, reducer] : step_.reducers) reducer->progress();
    }
    return recorder_.waiting([&] {
      return options_.channel->receive(link.rank, key,
                                       [this] { return concat("to run ", current_->text()); });
    });
  }
  PYDIST_CHECK(handed_over.has_value(), Error, "stage ", link.stage,
               " has not handed over yet; the schedule is not valid");
  Message message = std::move(*handed_over);
  handed_over.reset();
  return message;
}

void Executor::deliver(const Link& link, Message message) {
  if (link.rank != options_.rank) {
    options_.channel->send(link.rank, std::move(message));
    return;
  }
  for (Slot& slot : message.slots) slot.tensor = in_own_memory(std::move(slot.tensor));
  Stage& stage = stages_[index_of_stage_[link.stage]];
  StageFlight& flight = stage.flights[message.key.microbatch];
  const bool forwards = message.key.kind == MessageKind::kActivation;
  const std::vector<Link>& links = forwards ? stage.in : stage.out;
  size_t k = 0;
  while (links[k].port != link.port) ++k;
  (forwards ? flight.inputs : flight.gradients)[k] = std::move(message);
}

void Executor::send_result(const Stage& stage) {
  if (step_.kind == StepKind::kForward) return;
  result_ = stage.local.code->result();
  for (int rank = 0; rank < options_.schedule.num_ranks(); ++rank) {
    if (rank != options_.rank) options_.channel->send(rank, *result_);
  }
}

void Executor::end_step() {
  const int last = options_.schedule.num_stages() - 1;
  const int source = options_.schedule.rank_of_stage[last];
  if (step_.kind != StepKind::kForward && source != options_.rank) {
    result_ = options_.channel->receive(source, {MessageKind::kResult},
                                        [] { return "to return the loss of a step"; });
  }
  finish_rounds();
  if (step_.before_end) step_.before_end();
  if (options_.channel != nullptr) {
    options_.channel->end_step([] { return "to end the step"; });
  }
}

Reducer* Executor::reducer_of(const Action& action) const {
  if (action.kind == ActionKind::kForward) return nullptr;
  const auto found = step_.reducers.find(action.stage);
  return found == step_.reducers.end() ? nullptr : found->second.get();
}

// Ranks of other pipelines are waited for only now. They may depend on what their own pipeline's
// ranks send, as this one's do on ours, so that nothing of it may be left here. In the order of
// stages, which is the same on all replicas, whatever the order in which they were complete.
void Executor::finish_rounds() {
  if (step_.reducers.empty()) return;
  if (options_.channel != nullptr) {
    options_.channel->flush([] { return "before gradients are averaged over replicas"; });
  }
  for (const auto& [number, reducer] : step_.reducers) reducer->finish_round();
}

void Executor::warn_if_unsplit(Stage& stage, const StageFlight& flight) {
  const std::string& reason = flight.backward->why_not_split();
  if (reason.empty() || stage.warned || !options_.warn) return;
  stage.warned = true;
  options_.warn(
      concat("the backward of stage ", stage.local.stage,
             " cannot be split into I and W, so that B runs in the place of I: ", reason));
}

std::string Executor::where() const {
  const std::string rank = options_.channel != nullptr ? options_.channel->describe(options_.rank)
                                                       : concat("rank ", options_.rank);
  if (current_) return concat(rank, ", in ", text_of(*current_));
  return concat(rank, has_ended_ ? ", after its last action" : ", before its first action");
}

void Executor::fail(const std::string& reason) noexcept {
  for (const auto& [stage, reducer] : step_.reducers) reducer->give_up(reason);
  if (options_.channel != nullptr) options_.channel->fail(reason);
}

void Executor::refuse(StepKind kind, const std::string& cause) {
  current_.reset();
  has_ended_ = false;
  if (options_.channel == nullptr) return;
  try {
    options_.channel->begin_step(kind);
  } catch (const PeerError&) {  // all know that the step is over; the caller has its own to say
    return;
  }
  options_.channel->fail(concat(where(), " raised ", cause));
}

void Executor::drop_step() noexcept {
  for (Stage& stage : stages_) {
    for (StageFlight& flight : stage.flights) flight.clear();
    stage.context.skips.clear();
  }
  received_.clear();
  gradients_.clear();
  output_ = {};
  result_.reset();
}

}  // namespace pydist
