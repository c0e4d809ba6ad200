// Runs one rank's part of a step: its list of actions, what they receive, and what they send.
//
//   F  receives a value from the previous stage, runs the stage's code, sends its output on
//   B  receives the gradient of that output, runs autograd, sends the gradient of the input back
//   I  the same, for the input's gradient alone; W then adds to those of the parameters
//
// Two stages of one rank hand values over without a message, but like one: each stage has a graph
// of its own, and nobody else the memory (own_memory.h). Between F and backward only the edges of a
// stage's output are kept, not its memory. A microbatch that the batch has no rows for is absent:
// it is passed on as such and not computed. Where no tensor of a value requires a gradient, none is
// sent back.
//
// An executor is used by one thread at a time, without the GIL.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "bucket/reducer.h"
#include "pipeline/channel.h"
#include "pipeline/lowering.h"
#include "pipeline/recorder.h"
#include "pipeline/stage_code.h"
#include "pipeline/stage_flight.h"

namespace pydist {

// One stage that this rank holds.
struct LocalStage {
  int stage = 0;
  std::shared_ptr<StageCode> code;
  std::vector<Link> skips_in = {};
  std::vector<Link> skips_out = {};
};

struct ExecutorOptions {
  Schedule schedule;
  int rank = 0;
  std::shared_ptr<Channel> channel;  // null where this rank holds all stages
  std::vector<LocalStage> stages;
  std::optional<uint64_t> base_seed = std::nullopt;  // of layers; none: the user's own stream
  int data_parallel_rank = 0;
  std::optional<c10::Device> device = std::nullopt;  // of the stages, if not the CPU
  // Told once per stage whose backward cannot be split: B runs in the place of I.
  std::function<void(const std::string& text)> warn = nullptr;
};

struct StepOptions {
  StepKind kind = StepKind::kTrain;
  int64_t step = 0;  // the number that layers' seeds depend on
  // Of each microbatch that is there; those beyond are absent. Known where the first stage is;
  // elsewhere nothing (no number is known), or it must agree with what comes from there.
  std::optional<std::vector<int>> num_rows = std::nullopt;
  // Of the last stage's rank: the gradient of the total with respect to each microbatch's loss.
  std::vector<double> loss_gradients = {};
  // By stage, of a training step: what averages its gradients over the pipeline's replicas.
  std::map<int, std::shared_ptr<Reducer>> reducers = {};
  bool averages = true;  // else gradients stay this pipeline's own, until a later step
  // Called when this rank's gradients are there, before the step ends on all ranks; may be empty.
  std::function<void()> before_end = nullptr;
};

class Executor {
 public:
  explicit Executor(ExecutorOptions options);

  // The last stage's result; none where the step only runs forwards. After an exception nothing of
  // the step is left here, where() says where it was, and fail() must tell the others.
  std::optional<Message> run(StepOptions options);
  // "rank 1 (pid 1234), in 2F3 (forward of stage 2 for microbatch 3)": now, or where it failed.
  std::string where() const;
  void fail(const std::string& reason) noexcept;
  // Instead of run(): this rank cannot take part in the step, because of `cause`. Raises if the
  // others cannot be told.
  void refuse(StepKind kind, const std::string& cause);

  Recorder& recorder() { return recorder_; }

 private:
  // Of a microbatch.
  struct Rows {
    bool absent = false;
    int number = -1;  // -1: not known
  };
  struct Stage {
    LocalStage local;
    std::vector<Link> in;   // where inputs come from
    std::vector<Link> out;  // where outputs go to
    std::vector<StageFlight> flights;
    StageContext context;
    bool is_last = false;
    bool warned = false;
    bool was_cut = false;  // an I of this step has been split: its layers are not checkpointed
  };

  void add_stage(LocalStage local);
  void run_actions();
  void run_action(const PlannedAction& planned);
  void dispatch(Stage& stage, StageFlight& flight, const Action& action);

  void forward(Stage& stage, StageFlight& flight, int microbatch);
  Rows take_inputs(Stage& stage, StageFlight& flight, int microbatch, Message& input);
  Rows own_rows(int microbatch) const;
  void check_rows(const Rows& rows, int microbatch) const;
  void give_outputs(Stage& stage, StageFlight& flight, int microbatch, const Rows& rows);
  void take_gradients(Stage& stage, StageFlight& flight, int microbatch);
  void give_gradients(Stage& stage, StageFlight& flight, int microbatch);
  at::Tensor loss_gradient(const at::Tensor& loss, int microbatch) const;
  void warn_if_unsplit(Stage& stage, const StageFlight& flight);

  void add_skips(Stage& stage);
  Message obtain(const Link& link, const MessageKey& key, std::optional<Message>& handed_over);
  void deliver(const Link& link, Message message);
  void send_result(const Stage& stage);
  Reducer* reducer_of(const Action& action) const;
  void finish_rounds();
  void end_step();
  void drop_step() noexcept;

  ExecutorOptions options_;
  std::vector<Step> plan_;
  std::vector<Stage> stages_;
  std::vector<int> index_of_stage_;  // in stages_; -1: another rank's
  Recorder recorder_;

  // Of the step that is going on.
  StepOptions step_;
  std::optional<Action> current_;  // none: before the first or after the last one
  bool has_ended_ = false;         // after the last one
  int num_last_forwards_ = 0;
  std::optional<Message> result_;
  StageOutput output_;
  std::vector<at::Tensor> gradients_;   // that backward starts with
  std::vector<ReceivedEdge> received_;  // by the forward that is going on
};

}  // namespace pydist
