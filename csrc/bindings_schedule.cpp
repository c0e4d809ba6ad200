// The Python boundary of schedules: data and the questions about it, no logic.
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "pipeline/builders.h"
#include "pipeline/csv.h"
#include "pipeline/grid.h"
#include "pipeline/lowering.h"
#include "pipeline/search.h"
#include "pipeline/simulator.h"
#include "pipeline/validator.h"

namespace py = pybind11;

namespace pydist {

namespace {

using Texts = std::vector<std::vector<std::string>>;
using Spans = std::vector<std::vector<std::pair<double, double>>>;

Schedule schedule_from_texts(std::string name, const Texts& texts,
                             std::optional<std::vector<int>> rank_of_stage,
                             std::optional<int> num_microbatches) {
  std::vector<std::vector<Entry>> actions(texts.size());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    for (const std::string& text : texts[rank]) actions[rank].push_back(Entry::parse(text));
  }
  if (rank_of_stage && num_microbatches) {
    return {std::move(name), *num_microbatches, std::move(*rank_of_stage), std::move(actions)};
  }
  Schedule schedule = schedule_of(std::move(name), std::move(actions));
  if (rank_of_stage) schedule.rank_of_stage = std::move(*rank_of_stage);
  if (num_microbatches) schedule.num_microbatches = *num_microbatches;
  return schedule;
}

Texts texts_of(const Schedule& schedule) {
  Texts texts(schedule.actions.size());
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    for (const Entry& entry : schedule.actions[rank]) texts[rank].push_back(entry.text());
  }
  return texts;
}

Spans pairs_of(const std::vector<std::vector<TimeSpan>>& spans) {
  Spans pairs(spans.size());
  for (size_t rank = 0; rank < spans.size(); ++rank) {
    for (const TimeSpan& span : spans[rank]) pairs[rank].emplace_back(span.begin, span.end);
  }
  return pairs;
}

using LoweredAction = std::tuple<std::string, int, int, bool>;

std::vector<std::vector<LoweredAction>> lowered(const Schedule& schedule, int rank) {
  const auto as_tuple = [](const PlannedAction& planned) {
    return LoweredAction{planned.action.text(), planned.receives_from, planned.sends_to,
                         planned.completes_gradients};
  };
  std::vector<std::vector<LoweredAction>> steps;
  for (const Step& step : lower(schedule, rank)) {
    steps.push_back({as_tuple(step.first)});
    if (step.second) steps.back().push_back(as_tuple(*step.second));
  }
  return steps;
}

std::vector<std::tuple<int, std::string, int>> parse_actions(const std::string& text) {
  std::vector<std::tuple<int, std::string, int>> parts;
  for_each_action(Entry::parse(text), [&](const Action& action) {
    parts.emplace_back(action.stage, std::string(1, letter(action.kind)), action.microbatch);
  });
  return parts;
}

void bind_simulation(py::module_& module) {
  py::class_<Simulation>(module, "Simulation", "Times and memory of a schedule; see simulator.h.")
      .def_readonly("makespan", &Simulation::makespan)
      .def_readonly("makespan_bubble", &Simulation::makespan_bubble)
      .def_readonly("span_bubble", &Simulation::span_bubble)
      .def_readonly("peak_activations", &Simulation::peak_activations)
      .def_readonly("peak_after_forward", &Simulation::peak_after_forward)
      .def_readonly("peak_after_input", &Simulation::peak_after_input)
      .def_readonly("peak_nbytes", &Simulation::peak_nbytes)
      .def_readonly("peak_parked", &Simulation::peak_parked)
      .def_property_readonly("idle", [](const Simulation& self) { return pairs_of(self.idle); })
      .def_property_readonly("times", [](const Simulation& self) { return pairs_of(self.times); });
}

Costs costs_of(std::vector<double> forward, std::vector<double> backward, std::vector<double> input,
               std::vector<double> weight, double communication,
               std::vector<double> nbytes_after_forward, std::vector<double> nbytes_after_input) {
  return {std::move(forward),
          std::move(backward),
          std::move(input),
          std::move(weight),
          communication,
          std::move(nbytes_after_forward),
          std::move(nbytes_after_input)};
}

Schedule find_best(int num_ranks, int num_microbatches, int stages_per_rank, const Costs& costs,
                   std::vector<double> cap_nbytes) {
  return find_best_schedule(
      {num_ranks, num_microbatches, stages_per_rank, costs, std::move(cap_nbytes)});
}

}  // namespace

void bind_schedule(py::module_& module) {
  bind_simulation(module);
  py::class_<Costs>(module, "Costs", "Of one microbatch, by stage; see simulator.h.")
      .def(py::init(&costs_of), py::arg("forward"), py::arg("backward"), py::arg("input"),
           py::arg("weight"), py::arg("communication"), py::arg("nbytes_after_forward"),
           py::arg("nbytes_after_input"));
  py::class_<Schedule>(module, "Schedule", "By rank, the actions of one step; see schedule.h.")
      .def(py::init(&schedule_from_texts), py::arg("name"), py::arg("actions"),
           py::arg("rank_of_stage"), py::arg("num_microbatches"))
      .def_static("build", &build_schedule, py::arg("kind"), py::arg("num_ranks"),
                  py::arg("num_microbatches"), py::arg("stages_per_rank"), "A built-in schedule.")
      .def_static("from_csv", &from_csv, py::arg("name"), py::arg("text"), "Reads; see csv.h.")
      .def("to_csv", &to_csv, "A line for each rank.")
      .def_readonly("name", &Schedule::name)
      .def_readonly("num_microbatches", &Schedule::num_microbatches)
      .def_readonly("rank_of_stage", &Schedule::rank_of_stage)
      .def_property_readonly("actions", &texts_of)
      .def(
          "validate",
          [](const Schedule& self) {
            const Validity validity = validate(self);
            return std::make_pair(validity.has_backward, validity.accumulates_in_order);
          },
          "(whether it has backwards, by stage whether they accumulate in ascending order).")
      .def("simulate", &simulate, py::arg("costs"), "Times and memory.")
      .def("simulate_steps", &simulate_steps, "With one step for every entry.")
      .def(
          "forward_only",
          [](const Schedule& self) {
            return build_forward_only(self.rank_of_stage, self.num_microbatches);
          },
          "Forwards alone, with the same placement.")
      .def(
          "grid_of_lists", [](const Schedule& self) { return grid_of_lists(self, {}); },
          "Each rank's list from top to bottom.")
      .def("grid_of_times", &grid_of_times, py::arg("simulation"), "A row for each start.")
      .def("lowered", &lowered, py::arg("rank"),
           "By entry and action: (text, receives from, sends to, completes gradients); see "
           "lowering.h.");
  module.def("schedule_kinds", &schedule_kinds, "Names of the built-in schedules.");
  module.def("default_stages_per_rank", &default_stages_per_rank, py::arg("kind"),
             "Of a built-in schedule.");
  module.def("find_best_schedule", &find_best, py::arg("num_ranks"), py::arg("num_microbatches"),
             py::arg("stages_per_rank"), py::arg("costs"), py::arg("cap_nbytes"),
             py::call_guard<py::gil_scoped_release>(), "The shortest under a cap; see search.h.");
  module.def("parse_actions", &parse_actions, py::arg("text"),
             "(stage, kind, microbatch) of an action, or of both of an overlapped pair.");
}

}  // namespace pydist
