// policy.h
#include "recsdk/policy.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

#include "arguments/array.h"
#include "arguments/gil.h"
#include "arguments/handles.h"
#include "arguments/results.h"
#include "bindings.h"

namespace recsdk::bind {

namespace {

template <typename Number>
nb::object array_of(std::span<const Number> values, Result made) {
  std::copy(values.begin(), values.end(), static_cast<Number*>(made.data));
  return std::move(made.object);
}

nb::object column(std::span<const std::int64_t> values) {
  return array_of(values, make_rows(Framework::kNumpy, std::ssize(values)));
}

nb::object column(std::span<const float> values) {
  return array_of(values, make_floats(Framework::kNumpy, std::ssize(values)));
}

// Gives function(now, steps, times, counts, scores, places) arrays of Python's own, the last of
// which it fills with the bits of doubles.
void set_function(EvictConfig& config, nb::object function, bool keeps_counts, bool keeps_scores,
                  bool ignores_now) {
  const std::shared_ptr<nb::object> held(new nb::object(std::move(function)), release_python);
  config.keeps_counts = keeps_counts;
  config.keeps_scores = keeps_scores;
  config.ignores_now = ignores_now;
  config.function = [held](const EvictColumns& columns, std::span<double> places) {
    const WithGil gil;
    const Result found = make_rows(Framework::kNumpy, std::ssize(places));
    call_python(*held, columns.now, column(columns.steps), column(columns.times),
                column(columns.counts), column(columns.scores), found.object);
    std::memcpy(places.data(), found.data, places.size_bytes());
  };
}

}  // namespace

void bind_policy(nb::module_& module) {
  nb::enum_<EvictOrder>(module, "EvictOrder")
      .value("LRU", EvictOrder::kLru)
      .value("LFU", EvictOrder::kLfu)
      .value("SCORE", EvictOrder::kScore)
      .value("SHOW_CLICK", EvictOrder::kShowClick)
      .value("LOW_NORM", EvictOrder::kLowNorm)
      .value("FUNCTION", EvictOrder::kFunction)
      .value("SHOW_CLICK_TOTALS", EvictOrder::kShowClickTotals);
  nb::enum_<EvictClock>(module, "EvictClock")
      .value("STEP", EvictClock::kStep)
      .value("TIME", EvictClock::kTime);
  nb::class_<EvictConfig>(module, "EvictConfig")
      .def(nb::init<EvictOrder, EvictClock, std::optional<double>, std::int64_t,
                    std::optional<std::int64_t>, std::optional<std::int64_t>,
                    std::optional<std::int64_t>, std::int64_t, double, double, double,
                    std::optional<double>, std::optional<double>>(),
           nb::arg("order"), nb::arg("clock"), nb::arg("half_life").none(), nb::arg("min_age"),
           nb::arg("ttl").none(), nb::arg("rare_ttl").none(), nb::arg("rare_count").none(),
           nb::arg("expire_every"), nb::arg("alpha") = 1.0, nb::arg("beta") = 0.0,
           nb::arg("decay") = 1.0, nb::arg("share").none() = nb::none(),
           nb::arg("below").none() = nb::none())
      .def_rw("churn_steps", &EvictConfig::churn_steps, nb::arg("churn_steps").none())
      .def_rw("churn_records", &EvictConfig::churn_records)
      .def("set_function", &set_function, nb::arg("function"), nb::arg("keeps_counts"),
           nb::arg("keeps_scores"), nb::arg("ignores_now"));
  nb::enum_<AdmitTerm::Kind>(module, "AdmitKind")
      .value("COUNT", AdmitTerm::Kind::kCount)
      .value("PROBABILITY", AdmitTerm::Kind::kProbability)
      .value("ALL", AdmitTerm::Kind::kAll)
      .value("ANY", AdmitTerm::Kind::kAny)
      .value("SHOW_CLICK", AdmitTerm::Kind::kShowClick)
      .value("COUNT_SKETCH", AdmitTerm::Kind::kCountSketch)
      .value("SHOW_CLICK_OF_STEP", AdmitTerm::Kind::kShowClickOfStep);
  nb::class_<AdmitTerm>(module, "AdmitTerm")
      .def(nb::init<AdmitTerm::Kind, std::int64_t, double, double, double, double>(),
           nb::arg("kind"), nb::arg("count") = 1, nb::arg("probability") = 1.0,
           nb::arg("alpha") = 1.0, nb::arg("beta") = 0.0, nb::arg("threshold") = 1.0);
  nb::class_<AdmitConfig>(module, "AdmitConfig")
      .def(nb::init<std::vector<AdmitTerm>, std::optional<std::int64_t>,
                    std::optional<std::int64_t>>(),
           nb::arg("rule"), nb::arg("max_records").none(),
           nb::arg("max_bytes").none() = nb::none());
  nb::enum_<DefaultKind>(module, "DefaultKind")
      .value("CONSTANT", DefaultKind::kConstant)
      .value("INITIAL_ROW", DefaultKind::kInitialRow)
      .value("SHARED_ROWS", DefaultKind::kSharedRows);
  nb::enum_<BeginWith>(module, "BeginWith")
      .value("INITIAL_ROW", BeginWith::kInitialRow)
      .value("SHARED_ROW", BeginWith::kSharedRow);
  nb::class_<DefaultConfig>(module, "DefaultConfig")
      .def(nb::init<DefaultKind, float, std::int64_t, BeginWith>(), nb::arg("kind"),
           nb::arg("value"), nb::arg("num_rows"), nb::arg("begin_with"));
  module.def(
      "shared_row_keys",
      [](std::int64_t num_rows) {
        Result keys = make_rows(Framework::kNumpy, num_rows);
        for (std::int64_t row = 0; row < num_rows; ++row)
          static_cast<Key*>(keys.data)[row] = shared_row_key(row, num_rows);
        return std::move(keys.object);
      },
      nb::arg("num_rows"));
  nb::class_<EvictionState>(module, "EvictionState")
      .def(nb::init<std::int64_t, std::optional<std::int64_t>, bool, std::optional<std::int64_t>,
                    bool>(),
           nb::arg("step") = 0, nb::arg("lease_step").none() = nb::none(),
           nb::arg("is_begun") = false, nb::arg("time").none() = nb::none(),
           nb::arg("had_leases") = false)
      .def_ro("step", &EvictionState::step)
      .def_ro("lease_step", &EvictionState::lease_step)
      .def_ro("is_begun", &EvictionState::is_begun)
      .def_ro("time", &EvictionState::time)
      .def_ro("had_leases", &EvictionState::had_leases);
}

}  // namespace recsdk::bind
