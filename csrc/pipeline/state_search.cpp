// Owns the search through states.
#include "pipeline/state_search.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <utility>

#include "pipeline/readiness.h"
#include "pipeline/search_problem.h"

namespace pydist {

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
// Differences below this share of a time are rounding.
constexpr double kRounding = 1e-9;
// Stages looked at in all successors of all states; the width of layers follows from it. About a
// second; one state a layer is a greedy choice.
constexpr double kMaxWork = 6e7;
constexpr double kWidestLayer = 30000;
// The width of a first pass, which finds a bound for the next.
constexpr size_t kFirstWidth = 24;

struct State {
  std::vector<Done> done;        // by stage
  std::vector<double> free_at;   // by rank; not before the last start
  ByStageValue<double> arrives;  // at the stage that needs it next; kNever: not given yet
  int trace = -1;
};

// An action that leads from a state of an earlier layer to one of this.
struct Candidate {
  double bound = 0.0;
  double finish = 0.0;  // sum over ranks of their own bounds; breaks ties
  int layer = 0;
  int state = 0;
  Action action = {};
  double start = 0.0;
};

// How a state was reached.
struct Trace {
  int before = -1;
  Action action = {};
};

int layers_of(ActionKind kind) { return kind == ActionKind::kBackward ? 2 : 1; }

class Search {
 public:
  Search(const SearchProblem& problem, size_t width, double below)
      : problem_(problem), width_(width), below_(below) {}

  std::optional<Schedule> run() {
    const int last = problem_.num_layers();
    candidates_.resize(static_cast<size_t>(last) + 1);
    layers_[0].push_back(initial());
    for (int layer = 0; layer < last; ++layer) {
      if (layer > 0) fill(layer);
      for (int i = 0; i < static_cast<int>(states(layer).size()); ++i) expand(layer, i);
    }
    fill(last);
    if (states(last).empty()) return std::nullopt;
    return schedule_of_trace(states(last).front().trace);
  }

 private:
  // A state's successors lie one or two layers on, so three are kept.
  std::vector<State>& states(int layer) { return layers_[static_cast<size_t>(layer) % 3]; }

  State initial() const {
    return State{std::vector<Done>(static_cast<size_t>(problem_.num_stages())),
                 std::vector<double>(static_cast<size_t>(problem_.num_ranks()), 0.0),
                 ByStageValue<double>(problem_.empty(), kNever)};
  }

  void expand(int layer, int index) {
    State& state = states(layer)[index];
    for (int stage = 0; stage < problem_.num_stages(); ++stage) {
      const Done here = state.done[stage];
      if (here.forward < problem_.num_microbatches()) {
        propose(layer, index, {stage, ActionKind::kForward, here.forward});
      }
      if (here.backward < here.forward) {
        propose(layer, index, {stage, ActionKind::kInput, here.backward});
        if (here.accumulated == here.backward) {
          propose(layer, index, {stage, ActionKind::kBackward, here.backward});
        }
      }
      if (here.accumulated < here.backward) {
        propose(layer, index, {stage, ActionKind::kWeight, here.accumulated});
      }
    }
  }

  void propose(int layer, int index, const Action& action) {
    State& state = states(layer)[index];
    const int rank = problem_.rank_of(action.stage);
    double start = state.free_at[rank];
    for (const StageValue& value : needs_of(action, problem_.num_stages())) {
      if (value.stage != action.stage) start = std::max(start, state.arrives[value]);
    }
    if (start == kNever || leaves_a_gap_for_a_weight(state, action, rank, start)) return;
    const Done before = state.done[action.stage];
    count(action, &state.done[action.stage]);
    if (problem_.fits(state.done, rank)) {
      Candidate candidate{0.0, 0.0, layer, index, action, start};
      set_bounds(state, rank, &candidate);
      if (candidate.bound < below_) {
        candidates_[static_cast<size_t>(layer + layers_of(action.kind))].push_back(candidate);
      }
    }
    state.done[action.stage] = before;
  }

  // A W that fits before the action costs nothing there and takes up time later.
  bool leaves_a_gap_for_a_weight(const State& state, const Action& action, int rank,
                                 double start) const {
    if (action.kind == ActionKind::kWeight) return false;
    const double gap = (start - state.free_at[rank]) * (1 + kRounding);
    if (gap <= 0.0) return false;
    for (const int stage : problem_.stages_of(rank)) {
      const Done& done = state.done[stage];
      if (done.accumulated < done.backward && problem_.costs().weight[stage] <= gap) return true;
    }
    return false;
  }

  static void count(const Action& action, Done* done) {
    if (action.kind == ActionKind::kForward) ++done->forward;
    if (action.kind == ActionKind::kBackward || action.kind == ActionKind::kInput) {
      ++done->backward;
    }
    if (accumulates(action)) ++done->accumulated;
  }

  // `state` has counted the action, but not its time.
  void set_bounds(const State& state, int acting, Candidate* candidate) const {
    const double end = candidate->start + problem_.costs().of(candidate->action);
    const auto free_at = [&](int rank) {
      return rank == acting ? end : std::max(state.free_at[rank], candidate->start);
    };
    for (int rank = 0; rank < problem_.num_ranks(); ++rank) {
      const double finish = free_at(rank) + problem_.work_left(state.done, rank);
      candidate->bound = std::max(candidate->bound, finish);
      candidate->finish += finish;
    }
    for (int stage = 0; stage < problem_.num_stages(); ++stage) {
      const double way = problem_.way_left(state.done[stage], stage);
      candidate->bound = std::max(candidate->bound, free_at(problem_.rank_of(stage)) + way);
    }
  }

  // Makes the layer's states of its candidates, the most promising first.
  void fill(int layer) {
    std::vector<State>& made = states(layer);
    made.clear();
    same_done_.clear();
    std::vector<Candidate>& candidates = candidates_[static_cast<size_t>(layer)];
    std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
      return std::pair(a.bound, a.finish) < std::pair(b.bound, b.finish);
    });
    for (const Candidate& candidate : candidates) {
      if (made.size() == width_) break;
      State state = after(candidate);
      std::vector<int>& rivals = same_done_[hash(state.done)];
      const bool is_useless = std::any_of(rivals.begin(), rivals.end(), [&](int rival) {
        return is_nowhere_later(made[static_cast<size_t>(rival)], state);
      });
      if (is_useless) continue;
      rivals.push_back(static_cast<int>(made.size()));
      state.trace = static_cast<int>(traces_.size());
      traces_.push_back({states(candidate.layer)[candidate.state].trace, candidate.action});
      made.push_back(std::move(state));
    }
    candidates = {};
  }

  State after(const Candidate& candidate) {
    const Action& action = candidate.action;
    const double end = candidate.start + problem_.costs().of(action);
    State state = states(candidate.layer)[candidate.state];
    count(action, &state.done[action.stage]);
    for (double& time : state.free_at) time = std::max(time, candidate.start);
    state.free_at[problem_.rank_of(action.stage)] = end;
    if (const auto value = given_by(action)) {
      const int user = action.kind == ActionKind::kForward ? action.stage + 1 : action.stage - 1;
      const bool is_used = user >= 0 && user < problem_.num_stages();
      state.arrives[*value] = is_used ? end + problem_.travel(action.stage, user) : end;
    }
    return state;
  }

  static uint64_t hash(const std::vector<Done>& done) {
    uint64_t value = 1469598103934665603ULL;
    for (const Done& here : done) {
      for (const int number : {here.forward, here.backward, here.accumulated}) {
        value = (value ^ static_cast<uint64_t>(number)) * 1099511628211ULL;
      }
    }
    return value;
  }

  // Whether `a` has done the same as `b`, and everything that follows can start as early.
  bool is_nowhere_later(const State& a, const State& b) const {
    if (!(a.done == b.done)) return false;
    for (size_t rank = 0; rank < a.free_at.size(); ++rank) {
      if (a.free_at[rank] > b.free_at[rank] * (1 + kRounding)) return false;
    }
    // An arrival matters only behind the time at which its receiver is free.
    const auto in_time = [&](StageValueKind kind, int giver, int user, int begin, int end) {
      const double free_at = b.free_at[problem_.rank_of(user)];
      for (int microbatch = begin; microbatch < end; ++microbatch) {
        const StageValue value{kind, giver, microbatch};
        const double limit = std::max(free_at, b.arrives[value]) * (1 + kRounding);
        if (a.arrives[value] > limit) return false;
      }
      return true;
    };
    for (int stage = 0; stage + 1 < problem_.num_stages(); ++stage) {
      const Done& here = a.done[stage];
      const Done& next = a.done[stage + 1];
      if (!in_time(StageValueKind::kOutput, stage, stage + 1, next.forward, here.forward) ||
          !in_time(StageValueKind::kInputGradient, stage + 1, stage, here.backward,
                   next.backward)) {
        return false;
      }
    }
    return true;
  }

  Schedule schedule_of_trace(int trace) const {
    Schedule schedule = problem_.empty();
    for (; trace >= 0; trace = traces_[static_cast<size_t>(trace)].before) {
      const Action& action = traces_[static_cast<size_t>(trace)].action;
      schedule.actions[problem_.rank_of(action.stage)].push_back({action});
    }
    for (auto& entries : schedule.actions) std::reverse(entries.begin(), entries.end());
    return schedule;
  }

  const SearchProblem& problem_;
  const size_t width_;
  const double below_;
  std::array<std::vector<State>, 3> layers_;
  std::vector<std::vector<Candidate>> candidates_;  // by layer
  std::unordered_map<uint64_t, std::vector<int>> same_done_;
  std::vector<Trace> traces_;
};

size_t width_of_layers(const SearchProblem& problem) {
  const double work_of_a_state = 3.0 * problem.num_stages() * (problem.num_stages() + 4);
  const double width = kMaxWork / problem.num_layers() / work_of_a_state;
  return static_cast<size_t>(std::clamp(width, 1.0, kWidestLayer));
}

}  // namespace

std::optional<Schedule> search_states(const SearchRequest& request,
                                      const std::vector<int>& rank_of_stage, double below) {
  const SearchProblem problem(request, rank_of_stage);
  const size_t width = width_of_layers(problem);
  std::optional<Schedule> first = Search(problem, std::min(width, kFirstWidth), below).run();
  if (width <= kFirstWidth) return first;
  if (first) below = std::min(below, simulate(*first, request.costs).makespan * (1 - kRounding));
  std::optional<Schedule> best = Search(problem, width, below).run();
  return best ? best : first;
}

}  // namespace pydist
